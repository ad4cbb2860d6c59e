"""``kvpool inspect`` and ``kvpool clear``: what a store holds, and taking it away."""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from kvpool.cli.text import printable
from kvpool.config import Config
from kvpool.errors import ConfigError
from kvpool.registry import create_store, parse_url
from kvpool.store import Store, SupportsClear, SupportsScan

__all__ = ["add_commands"]

T = TypeVar("T")

_NAMESPACE = re.compile("[0-9a-f]{32}")
_OTHER = "(other keys)"


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="show what a store holds",
        description="List the namespaces of a store with the number of values in each, by group and shard.",
    )
    inspect.add_argument("store", metavar="URL", help="such as file:///var/cache/kv")
    inspect.set_defaults(run=_inspect)
    clear = commands.add_parser(
        "clear",
        help="remove what a store holds",
        description="Remove all values of a store, or those of one namespace. Engines that use it compute them again.",
    )
    clear.add_argument("store", metavar="URL", help="such as file:///var/cache/kv")
    clear.add_argument(
        "--namespace", type=_namespace, metavar="HEX", help="only this one, as `kvpool inspect` shows it"
    )
    clear.add_argument("--yes", action="store_true", help="do not ask")
    clear.set_defaults(run=_clear)


def _inspect(arguments: argparse.Namespace) -> int:
    found = _on(arguments.store, _count)
    for namespace, groups in sorted(found.items()):
        values = ", ".join(f"{printable(group)}: {n:,}" for group, n in sorted(groups.items()))
        print(f"{namespace:32}  {groups.total():>12,}  {values}")
    print(f"{'in all':32}  {sum(groups.total() for groups in found.values()):>12,}")
    return 0


def _clear(arguments: argparse.Namespace) -> int:
    prefix = f"{arguments.namespace}/" if arguments.namespace else ""
    what = f"namespace {arguments.namespace}" if prefix else "everything"

    async def clear(store: Store) -> int:
        if not isinstance(store, SupportsClear):
            raise ConfigError(f"{parse_url(arguments.store)}: {type(store).__name__} cannot remove many values at once")
        return await store.clear(prefix)

    if not arguments.yes and not _agreed(f"Remove {what} from {printable(str(parse_url(arguments.store)))}? [y/N] "):
        print("Nothing was removed.")
        return 1
    print(f"{_on(arguments.store, clear):,} values removed")
    return 0


async def _count(store: Store) -> dict[str, Counter[str]]:
    """Values by namespace, and by group and shard. A namespace's manifest, a text for people, counts apart."""
    if not isinstance(store, SupportsScan):
        raise ConfigError(f"{type(store).__name__} cannot list its keys")
    found: dict[str, Counter[str]] = defaultdict(Counter)
    async for key in store.scan():
        namespace, _, rest = key.partition("/")
        if _NAMESPACE.fullmatch(namespace):
            found[namespace][rest.partition("/")[0]] += 1
        else:
            found[_OTHER][namespace] += 1
    return found


def _on(url: str, work: Callable[[Store], Awaitable[T]]) -> T:
    """``work`` on an open store. Raises ConfigError, also for a store of which other processes see nothing."""
    config = Config.load({"store": url})
    store = create_store(config.store)
    if not store.capabilities.shared:
        raise ConfigError(f"{parse_url(url)} is private to the process that opens it, so this one would find it empty")

    async def main() -> T:
        async with store:
            return await work(store)

    return anyio.run(main, backend=config.event_loop)


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("there is nobody to ask; with --yes nothing is asked")
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False


def _namespace(text: str) -> str:
    if not _NAMESPACE.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a namespace: 32 hex digits, as `kvpool inspect` shows them")
    return text
