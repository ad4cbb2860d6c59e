"""Reading traces: what is one, what is not, and what hits at best."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kvpool.replay.trace import Trace, TraceError
from tests.replay.traces import made, write

GOOD = b'{"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [4, 9]}'


def test_requests_keep_their_order_their_lines_and_their_blocks() -> None:
    lines = [
        b"\n",
        GOOD + b"\r\n",
        b"   \n",
        b'{"hash_ids": [], "timestamp": 7.5, "other": null}',
        b'{"timestamp":0,"hash_ids":[4]}',
    ]
    trace = Trace.parse(lines)
    assert [trace.request(i).tolist() for i in range(len(trace))] == [[4, 9], [], [4]]
    assert trace.timestamps.tolist() == [5, 7.5, 0]
    assert trace.lines.tolist() == [2, 4, 5]
    assert (trace.longest, trace.unique, trace.ideal_hits()) == (2, 2, 1)


def test_only_the_first_requests_are_read() -> None:
    trace = Trace.parse([GOOD, b"", GOOD, b"broken"], requests=2)
    assert len(trace) == 2
    assert len(Trace.parse([GOOD], requests=5)) == 1


@pytest.mark.parametrize("seed", range(5))
def test_what_hits_at_best_is_what_was_repeated(tmp_path: Path, seed: int) -> None:
    prompts, hits = made(80, seed)
    trace = Trace.load(write(tmp_path / "t.jsonl", prompts))
    assert [trace.request(i).tolist() for i in range(len(trace))] == prompts
    assert trace.ideal_hits() == hits > 0


def test_only_a_prefix_hits() -> None:
    # 7 and 8 are stored, but a request that begins with something new cannot use them.
    assert Trace.parse([b'{"timestamp":0,"hash_ids":[7,8]}', b'{"timestamp":0,"hash_ids":[1,7,8]}']).ideal_hits() == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"timestamp": 0, "hash_ids": [1, 2', r"not JSON: .* at character \d+"),
        (b"timestamp,hash_ids", "not JSON"),
        (b"\xff\xfe\x00", "not text"),
        (b"[1, 2]", "no object with timestamp and hash_ids"),
        (b'"text"', "no object with timestamp and hash_ids"),
        (b'{"timestamp": 0}', "no object with timestamp and hash_ids"),
        (b'{"hash_ids": [1]}', "no object with timestamp and hash_ids"),
        (b'{"timestamp": "0", "hash_ids": [1]}', 'timestamp "0"'),
        (b'{"timestamp": -1, "hash_ids": [1]}', "timestamp -1"),
        (b'{"timestamp": true, "hash_ids": [1]}', "timestamp true"),
        (b'{"timestamp": NaN, "hash_ids": [1]}', "timestamp NaN"),
        (b'{"timestamp": 1e999, "hash_ids": [1]}', "timestamp Infinity"),
        (b'{"timestamp": 0, "hash_ids": 1}', "hash_ids 1"),
        (b'{"timestamp": 0, "hash_ids": {"1": 1}}', "hash_ids"),
        (b'{"timestamp": 0, "hash_ids": [1, -1]}', r"hash_ids \[1, -1\]"),
        (b'{"timestamp": 0, "hash_ids": [1.0]}', "hash_ids"),
        (b'{"timestamp": 0, "hash_ids": [true]}', "hash_ids"),
        (b'{"timestamp": 0, "hash_ids": [9223372036854775808]}', "2\\^63"),
        (b'{"timestamp": 0, "hash_ids": [' + b"9" * 5000 + b"]}", "not a request"),
        (b"[" * 100_000, "not a request"),
    ],
)
def test_a_broken_line_is_named(line: bytes, message: str) -> None:
    with pytest.raises(TraceError, match=f"^trace day, line 3: .*{message}") as found:
        Trace.parse([GOOD, b"\n", line, GOOD], name="day")
    assert len(str(found.value)) < 300


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"])
def test_a_file_without_requests_is_no_trace(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "empty"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="trace empty: there is no request in it"):
        Trace.load(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"missing: No such file"):
        Trace.load(tmp_path / "missing")
    with pytest.raises(TraceError, match="directory"):
        Trace.load(tmp_path)


def test_a_file_without_line_ends_is_not_read_to_its_end() -> None:
    with pytest.raises(TraceError, match="line 1: longer than"):
        Trace.load("/dev/zero")


@pytest.mark.parametrize("requests", [None, 3])
def test_a_pipe_is_read_once(tmp_path: Path, requests: int | None) -> None:
    prompts, _ = made(3000)
    file, pipe = write(tmp_path / "file", prompts), tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(file.read_bytes()))
    writer.start()
    trace = Trace.load(pipe, requests)
    writer.join()
    assert (trace.digest, len(trace)) == (Trace.load(file).digest, requests or len(prompts))


def test_the_digest_is_that_of_the_whole_file(tmp_path: Path) -> None:
    prompts, _ = made()
    one = Trace.load(write(tmp_path / "one", prompts))
    assert Trace.load(write(tmp_path / "same", prompts), requests=3).digest == one.digest
    assert Trace.load(write(tmp_path / "other", prompts[:-1])).digest != one.digest
