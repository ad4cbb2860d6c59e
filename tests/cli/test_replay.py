"""The command ``kvpool replay`` as a person or a script sees it."""

from __future__ import annotations

import importlib.abc
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote

import pytest

from kvpool.cli.main import main
from kvpool.cli.progress import Progress
from kvpool.replay.engine import Job, Outcome
from kvpool.replay.report import Report
from kvpool.replay.trace import Trace
from tests.replay.traces import made, write

PROMPTS, HITS = made(30)
LISTED = sum(map(len, PROMPTS))
TIMEOUT_S = 60


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(write(tmp_path / "day.jsonl", PROMPTS))


def kvpool(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvpool", *arguments]


def test_table_json_and_exit_code(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    assert main(["replay", trace, "--store", "memory://", "--json", str(file)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    table = dict(line.split("  ", 1) for line in out.splitlines())
    table = {name: value.strip() for name, value in table.items()}
    assert table["requests"] == f"{len(PROMPTS)}, {LISTED} blocks"
    assert table["block hit rate"].startswith(f"{HITS / LISTED:.2%} (ideal: {HITS / LISTED:.2%}")
    assert table["blocks verified"] == str(HITS)
    assert table["wrong blocks"] == "0"
    assert {"loaded", "saved", "lookup", "load", "save", "time"} <= table.keys()
    result = json.loads(file.read_text())
    assert result["block_hit_rate"] == HITS / LISTED
    assert (result["verified_blocks"], result["wrong_blocks"], result["complete"]) == (HITS, 0, True)
    assert result["seconds"] > 0


def test_only_the_first_requests(trace: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    assert main(["replay", trace, "--store", "memory://", "--requests", "3", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert (result["requests"], result["blocks"]) == (3, sum(map(len, PROMPTS[:3])))


def test_the_module_is_the_command(trace: str, tmp_path: Path) -> None:
    arguments = ("replay", trace, "--store", f"file://{tmp_path}/kv", "--engines", "2", "--block-bytes", "4KiB")
    done = subprocess.run(kvpool(*arguments), capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert "wrong blocks     0\n" in done.stdout


def test_wrong_blocks_are_named_and_fail(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "faults.json"
    script.write_text(json.dumps([{"kind": "flip", "op": "get", "times": 1}]))
    store = f"kvpool.testing.faults:FaultyStore?store={quote('memory://', safe='')}&script={quote(str(script))}"
    file = tmp_path / "result.json"
    assert main(["replay", trace, "--store", store, "--json", str(file)]) == 1
    wrong = json.loads(file.read_text())["wrong_blocks"]
    assert wrong > 0
    out, err = capsys.readouterr()
    assert f"wrong blocks     {wrong}\n" in out
    assert err.startswith("kvpool: wrong bytes, line ")


def test_a_replay_that_stops_says_where_and_why(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    assert main(["replay", trace, "--store", "memory://?capacity=512", "--json", str(file)]) == 1
    result = json.loads(file.read_text())
    assert not result["complete"]
    message = f"the replay stopped after {result['requests']} of {len(PROMPTS)} requests: line {result['requests']}: "
    reason = "the store refused blocks: memory store: no room for 1024 bytes in capacity=512"
    assert capsys.readouterr().err == f"kvpool: {message}{reason}\n"


def test_a_trace_from_standard_input(trace: str) -> None:
    with open(trace) as file:
        done = subprocess.run(
            kvpool("replay", "-", "--store", "memory://"), stdin=file, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"blocks verified  {HITS}\n" in done.stdout


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_standard_stream_may_be_closed(trace: str, closed: str) -> None:
    command = ["bash", "-c", f'exec "$@" {closed}', "-", *kvpool("replay", trace, "--store", "memory://")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["{trace}.missing", "--store", "memory://"], 1, "day.jsonl.missing: No such file"),
        (["{broken}", "--store", "memory://"], 1, "kvpool: trace broken, line 2: not JSON"),
        (["{trace}", "--store", "memroy://"], 2, "did you mean 'memory'?"),
        (["{trace}", "--store", "memory://?capcity=1"], 2, "did you mean 'capacity'?"),
        (["{trace}", "--store", "memory://", "--engines", "2"], 2, "memory:// is private to one (MemoryStore)"),
        (["{trace}", "--store", "memory://", "--json", "{trace}/no"], 1, "Not a directory"),
        (["{trace}", "--store", "memory://", "--block-bytes", "1PiB"], 2, "or set KVPOOL_STAGING_BYTES"),
        (["{trace}", "--store", "memory://", "--json", "{trace}"], 2, "that is the trace"),
        (["{trace}", "--store", "memory://", "--json", "{trace}.no/x"], 1, ".no/x: No such file"),
        (["redis://:hunterTWO@h\x1b", "--store", "memory://"], 1, r"redis://***@h\x1b: No such file"),
        (
            ["{trace}", "--store", "memory://", "--json", "redis://:hunterTWO@h"],
            1,
            "--json redis://***@h: No such file",
        ),
        (["{trace}", "--store", "tests.replay.stores:Broken"], 1, "RuntimeError: of a kind nobody thought of"),
        (["{trace}", "--store", "tests.replay.stores:Locked"], 1, "kvpool: the key is missing"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    (tmp_path / "broken").write_text('{"timestamp": 0, "hash_ids": [1]}\n{"timestamp": 1, "hash_i')
    filled = [a.format(trace=trace, broken=tmp_path / "broken") for a in arguments]
    assert main(["replay", *filled]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "hunter" not in err
    assert err.startswith("kvpool: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--store", "memory://", "--engines", "0"], "argument --engines: '0' is not a whole number of 1 or more"),
        (["--store", "memory://", "--requests", "-1"], "argument --requests: "),
        (
            ["--store", "memory://", "--requests", "1" + "0" * 30],
            "argument --requests: 100000000000000000... is too large",
        ),
        (["--store", "memory://", "--engines", "9" * 5000], "argument --engines: 999999999999999999... is too large"),
        (["--store", "memory://", "redis://:hunter@h\x1b"], r"unrecognized arguments: redis://***@h\x1b"),
        (["--store", "memory://", "--requests", "redis://:hunter@h"], "'redis://***@h' is not a whole number"),
        (["--store", "memory://", "--requests", "²"], "argument --requests: "),
        (["--store", "memory://", "--speed", "0"], "argument --speed: '0' is not a number above 0"),
        (["--store", "memory://", "--speed", "nan"], "argument --speed: "),
        (["--store", "memory://", "--block-bytes", "0"], "argument --block-bytes: '0' is not a size above 0"),
        (["--store", "memory://", "--block-bytes", "many"], "argument --block-bytes: "),
        ([], "the following arguments are required: --store"),
    ],
)
def test_arguments_are_checked(
    trace: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", trace, *arguments])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert "hunter" not in err


def test_a_url_that_is_no_command_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["redis://:hunter@h"])
    assert "redis://***@h" in (err := capsys.readouterr().err)
    assert "hunter" not in err


def test_a_secret_in_a_problem_is_not_shown(trace: str) -> None:
    report = Report(Job(Trace.load(trace), "memory://"))
    report.add(Outcome(2, 0, problem="a load failed: redis://:hunter@h is gone"))
    report.stop("a second one")
    assert report.as_dict()["problem"] == report.problem == "line 3: a load failed: redis://***@h is gone"


def test_the_result_replaces_an_older_one_only_as_a_whole(trace: str, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    file, link = folder / "day.json", tmp_path / "link.json"
    file.write_text("older")
    file.chmod(0o640)
    link.symlink_to(file)
    assert main(["replay", trace, "--store", "memroy://", "--json", str(link)]) == 2
    assert main(["replay", trace, "--store", "memroy://", "--json", str(folder / "new.json")]) == 2
    assert (file.read_text(), os.listdir(folder)) == ("older", ["day.json"])
    before = file.stat()
    assert main(["replay", trace, "--store", "memory://", "--json", str(link)]) == 0
    assert json.loads(file.read_text())["complete"]
    assert (os.listdir(folder), link.is_symlink()) == (["day.json"], True)
    assert (file.stat().st_mode, file.stat().st_ino != before.st_ino) == (before.st_mode, True)


def test_the_trace_is_not_overwritten_by_another_name(trace: str, tmp_path: Path) -> None:
    before = Path(trace).read_bytes()
    (tmp_path / "link").symlink_to(trace)
    assert main(["replay", trace, "--store", "memory://", "--json", str(tmp_path / "link")]) == 2
    assert Path(trace).read_bytes() == before


def test_the_result_goes_behind_the_table_on_the_same_output(trace: str, tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out:
        subprocess.run(
            kvpool("replay", trace, "--store", "memory://", "--json", "/dev/stdout"), stdout=out, timeout=TIMEOUT_S
        )
    table, _, result = (tmp_path / "out").read_text().partition("{")
    assert table.startswith("trace ")
    assert json.loads("{" + result)["complete"]


def test_a_full_disk_is_told_with_the_file(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", trace, "--store", "memory://", "--json", "/dev/full"]) == 1
    assert capsys.readouterr().err == "kvpool: --json /dev/full: No space left on device\n"


def test_there_are_no_more_engines_than_requests(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", trace, "--store", "memory://", "--requests", "1", "--engines", "5000"]) == 0
    assert "engines          1;" in capsys.readouterr().out


def test_too_many_open_files_are_told_with_what_to_do(trace: str, tmp_path: Path) -> None:
    limited = ["bash", "-c", 'ulimit -n 24; exec "$@"', "-"]
    arguments = kvpool("replay", trace, "--store", f"file://{tmp_path}/kv", "--engines", "30")
    done = subprocess.run([*limited, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 1
    assert "cannot be started: Too many open files; take fewer engines" in done.stderr
    assert "ulimit -n" in done.stderr


def test_an_interrupt_while_the_rest_is_imported_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, *_: object) -> None:
            if name == "kvpool.cli.replay":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "kvpool.cli.replay")
    monkeypatch.delattr("kvpool.cli.replay")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert main(["--version"]) == 130
    assert capsys.readouterr().err == "kvpool: interrupted\n"


def test_a_secret_in_the_url_is_not_shown(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["replay", trace, "--store", "memory://user:hunter2@host"])
    file = tmp_path / "result.json"
    main(["replay", trace, "--store", "tests.replay.stores:Lazy?password=hunter2", "--json", str(file)])
    assert "hunter2" not in "".join(capsys.readouterr())
    assert "hunter2" not in file.read_text()


def test_an_interrupt_ends_it_cleanly(tmp_path: Path) -> None:
    many, _ = made(5000)
    root = tmp_path / "kv"
    arguments = ("replay", str(write(tmp_path / "long.jsonl", many)), "--store", f"file://{root}")
    with subprocess.Popen(kvpool(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + TIMEOUT_S
        while not root.exists() and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert "block hit rate" in out
    assert err.startswith("kvpool: the replay stopped after ")
    assert err.endswith(" requests: interrupted\n")


def test_a_reader_that_goes_away_is_no_traceback(trace: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        done = subprocess.run(
            kvpool("replay", trace, "--store", "memory://"), stdout=closed, stderr=subprocess.PIPE, timeout=TIMEOUT_S
        )
    assert (done.returncode, done.stderr) == (1, b"")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_is_drawn_on_a_terminal_only() -> None:
    plain, terminal = io.StringIO(), Terminal()
    for stream in (plain, terminal):
        bar = Progress(stream, 10)
        for done in range(1, 11):
            bar.update(done, f"{done} requests")
        bar.clear()
    assert plain.getvalue() == ""
    drawn = terminal.getvalue().split("\r\x1b[K")
    assert drawn[-1] == ""  # the line is left empty
    assert " 100%  10 requests  0:00 left" in drawn[-2]
    assert len(drawn) == 4  # empty, the first, the last, cleared: those between came too soon
