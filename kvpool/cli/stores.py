"""The store that a command was given, and quiet while it is in use."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from kvpool.config import Config
from kvpool.registry import create_store, parse_url
from kvpool.store import Store

__all__ = ["named_store", "quiet"]


def named_store(url: str) -> tuple[Config, Store]:
    """The user's configuration with this store, and the store, closed. Raises ConfigError."""
    parse_url(url)  # first, so that a message names what was typed and not a field
    config = Config.load({"store": url})
    return config, create_store(config.store)


@contextmanager
def quiet() -> Iterator[None]:
    """What a store warns an engine of when it opens is found out by the command itself, and said in its own words."""
    log = logging.getLogger("kvpool")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
