"""``python -m benchmarks.hot_path [--json FILE] [--plot FILE.svg] [--runs N] [--only WORD] [--tokens N]``.

Runs kvpool and the MooncakeStore connector of the installed vLLM in turns, in one process on the same inputs, and
prints medians, spreads, ratios, keys and waves. The store is one that answers at once, so that only what both sides do
themselves is compared, in CPU time; the lookups are then repeated with stores that take 0.5 and 2 ms a call.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import anyio

from benchmarks.hot_path import channel, paths
from benchmarks.hot_path.measure import Row, alternate
from benchmarks.hot_path.report import as_json, header, line, plot
from benchmarks.hot_path.workload import FULL16, Prompt, five

TOKENS, REGIONS = 289_024, 100
DELAYS_MS = (0.5, 2.0)


async def lookups(
    prompts: dict[str, Prompt], wanted: Callable[[str], bool], ms: float, options: argparse.Namespace
) -> AsyncIterator[Row]:
    for name, (_, layout, stored, local) in paths.LOOKUPS.items():
        if wanted(name):
            async with paths.Lookup(prompts[layout], stored, local, ms / 1000).open() as lookup:
                clock = time.perf_counter if ms else time.thread_time
                yield await alternate(paths.lookup_path(name, lookup), options.runs, options.run_seconds, clock)


async def measure(options: argparse.Namespace) -> tuple[list[Row], dict[str, list[Row]]]:
    prompts = {"full16": Prompt(FULL16, options.tokens), "five": Prompt(five(), options.tokens)}
    rows = list[Row]()

    def wanted(name: str) -> bool:
        return options.only in name

    def keep(row: Row) -> None:
        rows.append(row)
        print(line(row), flush=True)

    print(header(f"{options.tokens:,} tokens, a store that answers at once"))
    async for row in lookups(prompts, wanted, 0.0, options):
        keep(row)
    others = [*paths.mask_paths(prompts["five"]), *paths.save_paths(prompts["five"])]
    for path in [*others, *paths.address_paths(options.tokens, REGIONS)]:
        if wanted(path.name):
            keep(await alternate(path, options.runs, options.run_seconds))
    for name, over_ipc in (("lookup_server_cpu", channel.server_cpu), ("lookup_32_concurrent_p99", channel.concurrent)):
        if wanted(name):
            keep(over_ipc(prompts["five"], options.runs))
    delayed: dict[str, list[Row]] = {}
    for ms in DELAYS_MS:
        print(header(f"the lookups with a store that takes {ms} ms a call"))
        found = delayed[str(ms)] = []
        async for row in lookups(prompts, wanted, ms, options):
            found.append(row)
            print(line(row, bound=False), flush=True)
    return rows, delayed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--run-seconds", type=float, default=0.05, help="a run of one side lasts so long at least")
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    options = parser.parse_args()
    rows, delayed = anyio.run(measure, options)
    if options.json:
        inputs = {"tokens": options.tokens, "regions": REGIONS, "runs": options.runs}
        options.json.write_text(as_json(rows, delayed, inputs) + "\n", encoding="utf-8")
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
