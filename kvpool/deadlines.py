"""Absolute deadlines on the running loop's clock, and which loop that is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

__all__ = ["fail_at", "move_on_at", "running_loop"]


def move_on_at(deadline: float) -> anyio.CancelScope:
    """A scope that is cancelled at ``deadline`` and then left quietly."""
    return anyio.CancelScope(deadline=deadline)


@contextmanager
def fail_at(deadline: float) -> Iterator[anyio.CancelScope]:
    """A scope that is cancelled at ``deadline`` and then raises TimeoutError."""
    with anyio.CancelScope(deadline=deadline) as scope:
        yield scope
    if scope.cancelled_caught:
        raise TimeoutError("the deadline has passed")


def running_loop() -> str:
    """The event loop this task runs on: "asyncio" or "trio"."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return "trio"
    return "asyncio"
