"""``kvpool lend``: keep a store open that lends this process's memory to others, until a signal ends it."""

from __future__ import annotations

import argparse
import signal
from collections.abc import AsyncIterator
from secrets import token_hex

import anyio

from kvpool.cli.stores import named_store
from kvpool.cli.text import complain, printable
from kvpool.errors import ConfigError, StoreError
from kvpool.registry import parse_url
from kvpool.store import UNKNOWN, Store

__all__ = ["add_command"]

_LOOK_S, _ANSWER_S = 2.0, 5.0


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "lend",
        help="lend memory of this machine to a store, until SIGINT or SIGTERM",
        description="Keep a store open that lends memory of this process to all who use it, such as "
        "mooncake://10.0.0.9?segment=64GiB. SIGINT (Ctrl-C) or SIGTERM takes the memory back in good order, and the "
        "exit code is 0. The store may come and go meanwhile.",
    )
    command.add_argument("store", metavar="URL", help="such as mooncake://10.0.0.9?segment=64GiB")
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    config, store = named_store(arguments.store)
    url, nbytes = parse_url(arguments.store), store.capabilities.lent_bytes
    if not nbytes:
        raise ConfigError(f"{url}: {type(store).__name__} lends no memory, as it is written here; see docs/mooncake.md")
    anyio.run(_lend, store, f"{nbytes / (1 << 30):.4g} GiB to {printable(str(url))}", backend=config.event_loop)
    return 0


async def _lend(store: Store, what: str) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with store, anyio.create_task_group() as tasks:
            tasks.start_soon(_watch, store, what)
            print(f"{await _first(signals)}: taking the memory back", flush=True)
            tasks.cancel_scope.cancel()
    print("The memory is taken back.", flush=True)


async def _first(signals: AsyncIterator[signal.Signals]) -> str:
    async for received in signals:
        return received.name
    raise AssertionError("signals have no end")


async def _watch(store: Store, what: str) -> None:
    """Say whether the store answers, each time that this changes."""
    answered: bool | None = None
    while True:
        answers = await _answers(store)
        if answers != answered:
            if answers:
                print(f"lending {what}", flush=True)
            else:
                complain(f"not lending {what}: the store does not answer; going on to try")
            answered = answers
        await anyio.sleep(_LOOK_S)


async def _answers(store: Store) -> bool:
    """Whether the store can tell that a key which nobody has put is not there."""
    deadline = anyio.current_time() + _ANSWER_S
    try:
        with anyio.move_on_after(2 * _ANSWER_S):
            return UNKNOWN not in (await store.exists([f"kvpool-lend/{token_hex(16)}"], deadline=deadline)).tolist()
    except StoreError:
        pass
    return False
