"""A synchronous engine: a plain step loop that never waits for the store.

Jobs go to kvpool's own event loop through a :class:`~kvpool.portal.Portal`; each step polls what has ended. While one
request is loading, the steps compute others. The same store is then read by a second engine.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvpool.hashes import BlockHashes, chain_hashes
from kvpool.portal import Portal
from tiny_engine.blocks import BlockPool, gaps
from tiny_engine.model import KVCache, Model, ModelConfig
from tiny_engine.sharing import Sharing

CHUNK_TOKENS = 256


@dataclass(eq=False)
class Request:
    """One prompt on its way. ``todo``: what is left of its prefill."""

    sequence: list[int]
    num_prompt: int
    end: int
    hashes: BlockHashes
    table: list[int]
    ready: npt.NDArray[np.bool_]
    todo: deque[tuple[int, int]]

    @property
    def answer(self) -> list[int]:
        return self.sequence[self.num_prompt :]


class StepEngine:
    """Greedy decoding, one chunk or one token a step. Everything in here runs on the caller's thread."""

    def __init__(self, model: Model, memory: KVCache, store: str) -> None:
        self.model, self.memory, self.block_size = model, memory, memory[0].shape[2]
        self.blocks = BlockPool(memory[0].shape[0])
        self.portal = Portal(lambda: Sharing.open(store, model, memory))
        self.loading: dict[object, Request] = {}
        self.saving: dict[object, list[int]] = {}
        self.running: deque[Request] = deque()

    def add(self, prompt: Sequence[int], max_new_tokens: int) -> Request:
        """Accept a prompt: take its blocks and send its lookup and load on their way."""
        end = len(prompt) + max_new_tokens
        table = self.blocks.allocate(-(-end // self.block_size))
        hashes = chain_hashes(prompt, self.block_size)
        request = Request(list(prompt), len(prompt), end, hashes, table, np.zeros(len(table), np.bool_), deque())
        self.loading[self.portal.submit(Sharing.load, hashes, len(prompt), table, 0)] = request
        return request

    def step(self) -> None:
        """Take in what has ended, then compute one piece of one request, if one is ready."""
        for job in self.portal.poll():
            if held := self.saving.pop(job.token, None):
                self.blocks.release(held)
            elif request := self.loading.pop(job.token, None):
                if job.error is None:  # else nothing was loaded, and all of it is computed
                    request.ready[job.result] = True
                request.todo.extend(gaps(request.ready, request.num_prompt, self.block_size, CHUNK_TOKENS))
                self.running.append(request)
        if self.running:
            self._compute(self.running[0])
            self.running.rotate(-1)
        else:
            self.portal.wait(0.1)  # nothing to compute: sleep until a job ends

    def _compute(self, request: Request) -> None:
        sequence = request.sequence
        in_prefill = bool(request.todo)
        start, stop = request.todo.popleft() if in_prefill else (len(sequence) - 1, len(sequence))
        logits = self.model.forward(sequence, start, stop, request.table, self.memory)
        if request.todo:
            return
        if in_prefill:
            self._save(request)
        sequence.append(int(logits.argmax()))
        if len(sequence) == request.end:
            self.running.remove(request)
            self.blocks.release(request.table)

    def _save(self, request: Request) -> None:
        new = np.flatnonzero(~request.ready[: len(request.hashes)])
        held = [request.table[i] for i in new]
        if held:
            self.blocks.pin(held)  # until the save is reported: then nobody reads them any more
            self.saving[self.portal.submit(save, request.hashes, new, held)] = held

    def run(self) -> None:
        """Step until every request and every job has ended."""
        while self.running or self.loading or self.saving:
            self.step()


async def save(sharing: Sharing, hashes: BlockHashes, new: npt.NDArray[np.intp], blocks: list[int]) -> None:
    await sharing.pool.save([sharing.pool.transfer(0, hashes, new, blocks)])


def main() -> None:
    model = Model(ModelConfig(layers=2))
    text = "A synchronous engine shares its blocks like any other. " * 20
    prompts = [list(f"{text}Question {i}: why?".encode()) for i in range(3)]
    answers = []
    with tempfile.TemporaryDirectory() as directory:
        for name in ("first", "second"):
            engine = StepEngine(model, model.new_kv(400, 16), Path(directory).as_uri())
            with engine.portal:
                requests = [engine.add(prompt, 8) for prompt in prompts]
                engine.run()
            answers.append([request.answer for request in requests])
            loaded = [int(request.ready.sum()) * engine.block_size for request in requests]
            free = engine.blocks.num_free == engine.blocks.num_blocks
            print(f"{name} engine: {loaded} of {[len(p) for p in prompts]} tokens loaded, all blocks free: {free}")
    print("answers equal:", answers[0] == answers[1])


if __name__ == "__main__":
    main()
