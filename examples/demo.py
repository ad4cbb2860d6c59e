"""Two engines in two processes share prefixes through one directory.

Process A answers questions about a long handbook and saves what it computed. Process B starts later, with empty memory.
It answers each prompt three times: cold (everything computed), from the store, and from its own prefix cache. All three
must agree, bit by bit.

    python examples/demo.py [--tokens 2000] [--answer 16] [--store URL]

The exit code is 0 only if every answer agrees and everything that was stored was reused.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BLOCK_SIZE = 16
CHILD_TIMEOUT_S = 300
CHILD_ENVIRONMENT = {
    # One thread: the model's many small matrix products gain nothing from more, and threads would spin.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    # A lookup that is late counts as a miss. A demo would rather wait, even on a machine that is busy with other work.
    "KVPOOL_LOOKUP_TIMEOUT_MS": "10000",
}


# ---- the prompts: text as bytes, one token a byte


def handbook(company: str, tokens: int) -> str:
    """A long system prompt of ``tokens`` bytes."""
    text = f"{company}: you answer our customers. Follow this handbook.\n"
    number = 1
    while len(text) < tokens:
        text += (
            f"{number}. A parcel of class {'ABCDE'[number % 5]} that is {number % 9 + 2} days late is refunded by "
            f"{number * 7 % 60 + 10} percent; above {number * 50} euros ask desk {number * 13 % 97}.\n"
        )
        number += 1
    return text[:tokens]


def ask(system: str, question: str) -> str:
    return f"{system}\nCustomer: {question}\nYou: "


# ---- one process: an engine that shares


async def play(job: dict[str, Any]) -> dict[str, Any]:
    """Answer the job's prompts in this process; ``cold`` and ``local`` runs only for a job that compares."""
    from tiny_engine.engine import Engine
    from tiny_engine.model import Model
    from tiny_engine.sharing import Sharing

    model = Model()
    num_blocks = 2 * -(-max(len(p) + job["answer"] for p in job["prompts"]) // BLOCK_SIZE)
    memory = model.new_kv(num_blocks, BLOCK_SIZE)
    alone = Engine(model, model.new_kv(num_blocks, BLOCK_SIZE), prefix_cache=False)
    await alone.generate(list(b"The first call of anything is slow."), 2)
    runs = []
    async with Sharing.open(job["store"], model, memory) as sharing:
        engine = Engine(model, memory, sharing=sharing)
        for prompt in job["prompts"]:
            run = {}
            if job["compare"]:
                run["cold"] = report(await alone.generate(prompt, job["answer"]))
                engine.reset(poison=float("nan"))  # what is read without having been loaded would show
            run["shared"] = report(await engine.generate(prompt, job["answer"]))
            await sharing.wait_saved()
            if job["compare"]:
                run["local"] = report(await engine.generate(prompt, job["answer"]))
                await sharing.wait_saved()
            runs.append(run)
        counters, namespace = sharing.pool.counters.snapshot(), sharing.pool.namespace
    return {"pid": os.getpid(), "runs": runs, "counters": counters, "facts": {namespace.hex: namespace.facts}}


def report(completion: Any) -> dict[str, Any]:
    """A completion as JSON; ``bits`` is a digest of the logits behind every token."""
    return {
        "answer": completion.tokens,
        "bits": hashlib.sha256(completion.logits.tobytes()).hexdigest(),
        "local": completion.local_tokens,
        "loaded": completion.loaded_tokens,
        "computed": completion.computed_tokens,
        "ms": 1000 * completion.time_to_first_token,
    }


def child() -> None:
    """What a started process does: a job from stdin, its result to stdout."""
    try:
        import anyio

        from kvpool.errors import KVPoolError
    except ModuleNotFoundError as error:
        sys.exit(
            f"the module {error.name} is not installed for {sys.executable}: run make demo, or install kvpool first"
        )
    try:
        print(json.dumps(anyio.run(play, json.load(sys.stdin))))
    except KVPoolError as error:
        sys.exit(str(error))


def start(store: str, prompts: Sequence[Sequence[int]], answer: int, *, compare: bool) -> dict[str, Any]:
    """Run one process to its end. Raises RuntimeError with what it said if it failed."""
    job = {"store": store, "prompts": prompts, "answer": answer, "compare": compare}
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--child"],
            input=json.dumps(job),
            env={**os.environ, **CHILD_ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=CHILD_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"a process did not finish within {CHILD_TIMEOUT_S} seconds") from None
    if done.returncode:
        raise RuntimeError(f"a process ended with exit code {done.returncode}:\n{done.stderr.strip()}")
    sys.stderr.write(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


# ---- what a person sees


def table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows under their first one, the header; all columns but the first are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for i, row in enumerate(rows):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        print("  " + "  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
        if not i:
            print("  " + "  ".join("-" * width for width in widths))
    print()


def size(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"


def show_writer(names: Sequence[str], result: dict[str, Any]) -> None:
    print(f"Process A (pid {result['pid']}) computes, and saves to the store in the background:\n")
    rows: list[tuple[str, ...]] = [("prompt", "tokens", "own cache", "computed", "first token")]
    for name, run in zip(names, result["runs"], strict=True):
        r = run["shared"]
        total = r["local"] + r["loaded"] + r["computed"]
        rows.append((name, str(total), str(r["local"]), str(r["computed"]), f"{r['ms']:.0f} ms"))
    table(rows)
    counters = result["counters"]
    print(f"  It saved {counters['saved_chunks']} blocks ({size(counters['saved_bytes'])}) and ended.\n")


def show_reader(names: Sequence[str], result: dict[str, Any]) -> None:
    print(f"Process B (pid {result['pid']}), its memory empty before each prompt, loads from the store:\n")
    rows: list[tuple[str, ...]] = [
        ("prompt", "tokens", "not computed", "cold", "store", "own cache", "faster", "tokens", "bits")
    ]
    for name, run in zip(names, result["runs"], strict=True):
        cold, shared, local = run["cold"], run["shared"], run["local"]
        rows.append(
            (
                name,
                str(cold["computed"]),
                f"{shared['loaded']} ({100 * shared['loaded'] // cold['computed']} %)",
                *(f"{r['ms']:.0f} ms" for r in (cold, shared, local)),
                f"{cold['ms'] / shared['ms']:.1f}x",
                "equal" if cold["answer"] == shared["answer"] == local["answer"] else "DIFFER",
                "equal" if cold["bits"] == shared["bits"] == local["bits"] else "DIFFER",
            )
        )
    table(rows)
    print("  cold, store, own cache: time to first token with nothing reused, with the store, with B's own memory.")
    print("  tokens, bits: the three answers, and the logits behind every token of them.\n")


def show_store(directory: Path, facts: dict[str, Any]) -> None:
    print("In the store, one object a block:\n")
    found: dict[str, list[int]] = {}
    for path in directory.rglob("*"):
        if path.is_file():
            found.setdefault(path.relative_to(directory).parts[0], []).append(path.stat().st_size)
    rows = [("namespace", "objects", "size")]
    rows += [(name, str(len(sizes)), size(sum(sizes))) for name, sizes in sorted(found.items())]
    table(rows)
    for name in found.keys() & facts.keys():
        of = facts[name]
        print(
            f"  {name[:8]}...: {of['engine']}, {of['model']['layers']} layers, {of['dtype']}, blocks of "
            f"{of['block_size']} tokens, weights {of['weights'][:8]}...\n"
        )


def problems(names: Sequence[str], stored: Sequence[int], result: dict[str, Any]) -> list[str]:
    """What is wrong with B's answers; ``stored``: how many tokens of each prompt A has left in the store."""
    found = []
    for name, expected, run in zip(names, stored, result["runs"], strict=True):
        found += [
            f"{name}: the {what} of the {mode} run differs from the cold run"
            for mode in ("shared", "local")
            for what in ("answer", "bits")
            if run[mode][what] != run["cold"][what]
        ]
        if run["shared"]["loaded"] < expected:
            found.append(f"{name}: {run['shared']['loaded']} tokens were loaded, {expected} are stored")
    return found


def demo(store: str, directory: Path | None, tokens: int, answer: int) -> int:
    started = time.perf_counter()
    rules = handbook("Ferry & Sons", tokens)
    shown = re.sub("//[^/@]*@", "//***@", store.partition("?")[0])  # options may hold a secret, too
    print(f"kvpool demo: two engines share their KV cache through {shown}\n")

    asked = {
        "where is my parcel?": ask(rules, "My parcel of class B is 4 days late. Where is it?"),
        "I want a refund": ask(rules, "I paid 430 euros and want a refund."),
    }
    a_prompts = [list(text.encode()) for text in asked.values()]
    a = start(store, a_prompts, answer, compare=False)
    show_writer(list(asked), a)
    if reason := failure(a["counters"]):
        print(f"WRONG: the store does not work for process A: {reason}. kvpool doctor tells what is wrong with it.")
        return 1

    chat = [*a_prompts[0], *a["runs"][0]["shared"]["answer"], *b"\nCustomer: That is no answer. Try again.\nYou: "]
    b_prompts = {
        "the same question": a_prompts[0],
        "a new question": list(ask(rules, "Can I send a piano?").encode()),
        "the first chat goes on": chat,
        "another handbook": list(ask(handbook("Acme Air", tokens), "Where is my parcel?").encode()),
    }
    prompts = list(b_prompts.values())
    b = start(store, prompts, answer, compare=True)
    show_reader(list(b_prompts), b)
    if directory:
        show_store(directory, b["facts"])

    # What a prompt has in common with A's, in whole blocks and below its last token, must have been reused.
    known = [p + run["shared"]["answer"][:-1] for p, run in zip(a_prompts, a["runs"], strict=True)]
    stored = [max(min(common(p, k), len(p) - 1) // BLOCK_SIZE * BLOCK_SIZE for k in known) for p in prompts]
    wrong = problems(list(b_prompts), stored, b)
    for line in wrong:
        print(f"WRONG: {line}")
    if wrong:
        print("Counted in B:", ", ".join(f"{name} {n}" for name, n in b["counters"].items() if n))
    if not any(r["shared"]["loaded"] for r in b["runs"]):
        reason = failure(b["counters"])
        print(
            f"Nothing was reused: the store does not work for process B: {reason}."
            if reason
            else "Nothing was reused: processes must be able to share the store, which memory:// cannot."
        )
    if not wrong:
        reused, total = sum(r["shared"]["loaded"] for r in b["runs"]), sum(map(len, prompts))
        print(f"Process B did not compute {reused} of {total} prompt tokens; every answer is equal, bit by bit.")
    print(f"({time.perf_counter() - started:.0f} s)")
    return 1 if wrong else 0


def failure(counters: dict[str, int]) -> str:
    """What of the store's work has failed, in its counters; empty if nothing has."""
    bad = ("lookup_failed", "lookup_late", "save_failed_chunks", "save_rejected_chunks", "save_late_chunks")
    return ", ".join(f"{name} {counters[name]}" for name in bad if counters[name])


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def main() -> int:
    parser = argparse.ArgumentParser(description="Two engines in two processes share prefixes through one directory.")
    parser.add_argument("--tokens", type=int, default=2000, help="length of the handbook, up to 7000 (default: 2000)")
    parser.add_argument("--answer", type=int, default=16, help="tokens to generate per prompt (default: 16)")
    parser.add_argument("--store", help="store URL (default: a file store in a temporary directory)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child()
        return 0
    if not 100 <= args.tokens <= 7000 or not 1 <= args.answer <= 500:
        parser.error("--tokens must be 100 to 7000, --answer 1 to 500")
    try:
        if args.store:
            return demo(args.store, None, args.tokens, args.answer)
        with tempfile.TemporaryDirectory(prefix="kvpool-demo-") as directory:
            return demo(Path(directory).as_uri(), Path(directory), args.tokens, args.answer)
    except RuntimeError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
