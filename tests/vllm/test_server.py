"""vLLM's API server over HTTP, as people run it: completions, metrics, a reset. One server for all of it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine import BLOCK, PATIENCE, PATIENT, environment, prompt, transfer_config
from tests.vllm.models import write_llama, write_tokenizer


class Server:
    """``python -m vllm.entrypoints.openai.api_server`` on a free loopback port, in its own process group."""

    def __init__(self, model: Path, store: str, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        options: dict[str, object] = {
            "model": model,
            "served-model-name": "tiny",
            "host": "127.0.0.1",
            "port": self.port,
            "dtype": "float32",
            "max-model-len": 2048,
            "max-num-seqs": 8,
            "block-size": BLOCK,
            "kv-cache-memory-bytes": 64 << 20,
            "kv-transfer-config": json.dumps(transfer_config({**PATIENT, "store": store})),
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        variables = environment() | {
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        }
        variables.pop("VLLM_CPU_KVCACHE_SPACE", None)
        self._log = log
        with log.open("w") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words, "--enforce-eager"],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,
            )

    def wait(self) -> None:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                self.get("/health")
                return
            except OSError:
                assert self._process.poll() is None, self._log.read_text()[-4000:]
                assert time.monotonic() < end, "the server does not come up"
                time.sleep(0.1)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=PATIENCE) as answer:
            return str(answer.read().decode())

    def post(self, path: str, body: object = None) -> Any:
        data = b"" if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.loads(answer.read() or b"null")

    def complete(self, text: str) -> tuple[str, list[float]]:
        """The greedy continuation and its log probabilities."""
        body = {"model": "tiny", "prompt": text, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 1}
        (choice,) = self.post("/v1/completions", body)["choices"]
        assert choice["finish_reason"] == "length"
        return choice["text"], choice["logprobs"]["token_logprobs"]

    def counters(self) -> dict[str, float]:
        """kvpool's counters in /metrics, over all labels."""
        found: dict[str, float] = {}
        for name, value in re.findall(r"^kvpool:(\w+)_total\{.*?\} (\S+)$", self.get("/metrics"), re.MULTILINE):
            found[name] = found.get(name, 0) + float(value)
        return found

    def until(self, counter: str, value: float) -> None:
        """Saves end in the background, and counters travel with the engine's steps."""
        end = time.monotonic() + PATIENCE
        while self.counters().get(counter, 0) < value:
            assert time.monotonic() < end, (counter, value, self.counters())
            self.complete("w5 w6")
            time.sleep(0.05)

    def reset(self, query: str = "") -> None:
        """vLLM refuses while blocks are held, by a save that has just ended for example."""
        end = time.monotonic() + PATIENCE
        while not self.post(f"/reset_prefix_cache{query}")["success"]:
            assert time.monotonic() < end, "some block is held for ever"
            self.complete("w5 w6")

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(30)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    model = write_llama(folder / "model")
    write_tokenizer(model)
    server = Server(model, f"file://{folder}/store", folder / "log")
    try:
        server.wait()
        yield server
    finally:
        server.close()


def test_completions_metrics_and_reset(server: Server) -> None:
    text = " ".join(f"w{token}" for token in prompt(1000, seed=1))
    blocks = 1000 // BLOCK
    cold, _ = server.complete(text)
    server.until("saved_chunks", blocks)
    local = server.complete(text)
    assert local[0] == cold
    assert server.counters().get("loaded_chunks", 0) == 0, "that was the engine's own prefix cache"

    # Without the connector the reset empties the engine's cache alone: the store serves the prompt.
    server.reset()
    assert server.complete(text) == local
    server.until("loaded_chunks", blocks)
    assert server.counters()["lookup_hits"] == 1

    # With the connector, nothing that was stored before is found: the prompt is computed and saved anew.
    server.reset("?reset_external=true")
    assert server.complete(text)[0] == cold
    server.until("saved_chunks", 2 * blocks)
    counted = server.counters()
    assert counted["loaded_chunks"] == blocks
    assert counted["lookup_hits"] == 1
    assert not any(value for name, value in counted.items() if "failed" in name or "corrupt" in name)
