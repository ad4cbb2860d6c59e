"""The binary hash codec against msgpack of hex strings, the form that earlier connectors sent.

Run from the checkout: ``.venv/bin/python benchmarks/hash_codecs.py`` (needs msgspec, which vLLM brings along). All ways
take turns in one process. Prints bytes and median milliseconds, and the ratio to the binary codec.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvpool.hashes import BlockHashes
from kvpool.protocols.binary import BinaryCodec

SCHEME = "benchmark"


def binary_encode(digests: list[bytes]) -> bytes:
    """From the engine's list of digests to one frame."""
    hashes = BlockHashes(scheme=SCHEME)
    hashes.extend(digests)
    return b"".join(BinaryCodec().encode(hashes))


def binary_decode(frame: bytes) -> BlockHashes:
    return BinaryCodec().decode(frame, scheme=SCHEME)


def hex_encode(digests: list[bytes]) -> bytes:
    return msgspec.msgpack.encode([digest.hex() for digest in digests])


def hex_decode(frame: bytes) -> list[bytes]:
    return [bytes.fromhex(digest) for digest in msgspec.msgpack.decode(frame)]


def times(rounds: int, *ways: Callable[[], object]) -> list[float]:
    """Median milliseconds of each way, taking turns."""
    found: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds):
        for way, out in zip(ways, found, strict=True):
            start = time.perf_counter()
            way()
            out.append((time.perf_counter() - start) * 1000)
    return [median(out) for out in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=51)
    options = parser.parse_args()
    print("| digests of 32 bytes | | binary | msgpack of hex | ratio |\n|---|---|---|---|---|")
    for count in (2_258, 18_064, 72_256):
        digests = [os.urandom(32) for _ in range(count)]
        frames = binary_encode(digests), hex_encode(digests)
        assert list(binary_decode(frames[0])) == hex_decode(frames[1]) == digests
        rows = {"bytes": [float(len(frame)) for frame in frames]}
        rows["encode, ms"] = times(options.rounds, partial(binary_encode, digests), partial(hex_encode, digests))
        rows["decode, ms"] = times(options.rounds, partial(binary_decode, frames[0]), partial(hex_decode, frames[1]))
        for what, (ours, other) in rows.items():
            form = ",.0f" if what == "bytes" else ".3f"
            print(f"| {count:,} | {what} | {ours:{form}} | {other:{form}} | {other / ours:,.1f} |")


if __name__ == "__main__":
    main()
