"""``kvpool inspect`` and ``kvpool clear``: what a store holds, and taking it away."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Coroutine
from typing import Any, TypeVar

import anyio

from kvpool.cli.stores import named_store, quiet
from kvpool.cli.text import printable
from kvpool.config import Config
from kvpool.errors import ConfigError, KVPoolError
from kvpool.keys import Fact
from kvpool.manifest import read_manifests
from kvpool.registry import parse_url
from kvpool.store import Store, SupportsClear, SupportsMissing, SupportsScan

__all__ = ["add_commands"]

T = TypeVar("T")

_NAMESPACE = re.compile("[0-9a-f]{32}")
_OTHER = "(other keys)"


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="show what a store holds",
        description="List the namespaces of a store with the number of values in each, by group and shard; or, with "
        "--namespace, show what one of them stands for.",
    )
    inspect.add_argument("store", metavar="URL", help="such as file:///var/cache/kv")
    inspect.add_argument(
        "--namespace", type=_namespace, metavar="HEX", help="show the facts that this one stands for (its manifest)"
    )
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
    if arguments.namespace:
        return _show_manifests(arguments.store, arguments.namespace)
    config, store = _existing(arguments.store)
    if not isinstance(store, SupportsScan):
        raise _cannot(arguments.store, store, "list its keys")
    found = _run(config, store, _count(store))
    if not found:
        print("Nothing is stored.")
        return 0
    print(f"{'namespace':32}  {'values':>12}  by group.shard")
    for namespace, groups in sorted(found.items()):
        values = ", ".join(f"{printable(group)}: {n:,}" for group, n in sorted(groups.items()))
        print(f"{namespace:32}  {groups.total():>12,}  {values}")
    print(f"{'in all':32}  {sum(groups.total() for groups in found.values()):>12,}")
    return 0


def _show_manifests(url: str, namespace: str) -> int:
    config, store = _existing(url)
    if not isinstance(store, SupportsScan):
        raise _cannot(url, store, "list its keys")

    async def read() -> list[dict[str, Fact]]:
        return [manifest async for manifest in read_manifests(store, namespace)]

    found = _run(config, store, read())
    if not found:
        raise KVPoolError("this namespace has no manifest in the store")
    for manifest in found:
        for line in json.dumps(manifest, indent=2, sort_keys=True, ensure_ascii=False).splitlines():
            print(printable(line))
    return 0


def _clear(arguments: argparse.Namespace) -> int:
    prefix = f"{arguments.namespace}/" if arguments.namespace else ""
    what = f"namespace {arguments.namespace}" if prefix else "everything"

    config, store = _existing(arguments.store)
    if not isinstance(store, SupportsClear):
        raise _cannot(arguments.store, store, "remove many values at once")
    if not arguments.yes and not _agreed(f"Remove {what} from {printable(str(parse_url(arguments.store)))}? [y/N] "):
        print("Nothing was removed.")
        return 1
    removed = _run(config, store, store.clear(prefix))
    print(f"{removed:,} values removed")
    return 0


async def _count(store: SupportsScan) -> dict[str, Counter[str]]:
    """Values by namespace, and by group and shard. A namespace's manifest, a text for people, counts apart."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    async for key in store.scan():
        namespace, _, rest = key.partition("/")
        if _NAMESPACE.fullmatch(namespace):
            found[namespace][rest.partition("/")[0]] += 1
        else:
            found[_OTHER][namespace] += 1
    return found


def _existing(url: str) -> tuple[Config, Store]:
    """A store that is there already, closed. Raises ConfigError if other processes see nothing of it, KVPoolError if
    opening it would make it."""
    config, store = named_store(url)
    if not store.capabilities.shared:
        raise ConfigError(f"{parse_url(url)} is private to the process that opens it, so this one would find it empty")
    if isinstance(store, SupportsMissing) and (missing := store.missing()):
        raise KVPoolError(missing)
    return config, store


def _cannot(url: str, store: Store, what: str) -> ConfigError:
    return ConfigError(f"{parse_url(url)}: {type(store).__name__} cannot {what}; docs/inspect.md has other ways")


def _run(config: Config, store: Store, work: Coroutine[Any, Any, T]) -> T:
    """``work`` while ``store`` is open."""

    async def main() -> T:
        async with store:
            return await work

    try:
        with quiet():
            return anyio.run(main, backend=config.event_loop)
    finally:
        work.close()


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
