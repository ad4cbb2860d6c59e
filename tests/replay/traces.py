"""Traces with a known answer: every request repeats so many blocks of an earlier one and adds new ones."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

__all__ = ["made", "write"]


def made(requests: int = 60, seed: int = 1) -> tuple[list[list[int]], int]:
    """The block ids of each request, and how many of them all hit in a store that was empty and has no limit."""
    choose = random.Random(seed)
    fresh = itertools.count(choose.randrange(1000))
    prompts: list[list[int]] = []
    hits = 0
    for _ in range(requests):
        earlier = choose.choice(prompts) if prompts else []
        common = choose.randrange(len(earlier) + 1)
        hits += common
        prompts.append(earlier[:common] + list(itertools.islice(fresh, choose.randrange(8))))
    return prompts, hits


def write(path: Path, prompts: list[list[int]], every_ms: int = 10) -> Path:
    lines = [
        {"timestamp": i * every_ms, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
        for i, ids in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
