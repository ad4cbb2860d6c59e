"""The configuration: its sources in order, and refusals that name field, place, value and what is allowed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvpool.config import Config
from kvpool.errors import ConfigError


def load(
    values: dict[str, object] | None = None, environ: dict[str, str] | None = None, file: Path | None = None
) -> Config:
    return Config.load(values, environ=environ or {}, config_file=file)


def test_defaults() -> None:
    config = load()
    assert (config.store, config.transport, config.codec) == ("memory://", "", "binary")
    assert (config.staging_bytes, config.batch_bytes) == (256 << 20, 8 << 20)
    assert (config.save_enabled, config.load_enabled, config.event_loop) == (True, True, "asyncio")


def test_every_field_says_what_is_allowed() -> None:
    assert [name for name, field in Config.model_fields.items() if not field.description] == []


def test_sources_in_order(tmp_path: Path) -> None:
    file = tmp_path / "kvpool.toml"
    file.write_text('store = "file:///from-file"\ncodec = "file"\ntenant = "file"\nload_timeout_s = 3\n')
    environ = {"KVPOOL_CODEC": "environment", "KVPOOL_TENANT": "environment", "KVPOOL_CONFIG": str(file), "OTHER": "1"}
    config = load({"tenant": "given"}, environ)
    assert (config.store, config.codec, config.tenant) == ("file:///from-file", "environment", "given")
    assert (config.load_timeout_s, config.save_timeout_s) == (3.0, 30.0)
    assert load({"config_file": str(file)}).codec == "file"
    assert load(file=file).codec == "file"


@pytest.mark.parametrize("store", ["file:///kv?capcity=1GiB", {"url": "file:///kv", "capcity": "1GiB"}])
def test_problems_of_all_kinds_come_at_once(store: object) -> None:
    values: dict[str, object] = {"store": store, "load_timeout_s": 0, "transport": "zmq+ipc://x?y=1", "nothing": 1}
    with pytest.raises(ConfigError) as raised:
        Config.load(values, environ={}, name="the engine's config")
    said = str(raised.value).splitlines()
    assert len(said) == 4
    assert all(line.startswith("the engine's config: ") for line in said)
    for line, what in zip(said, ("nothing=1", "load_timeout_s=0", "store: file:///kv", "transport: zmq"), strict=True):
        assert what in line


def test_problems_of_urls_alone_are_found_on_request() -> None:
    values: dict[str, object] = {"store": "memory://?size=1", "transport": "zmq+ipc://x?y=1"}
    assert load(values).store == "memory://?size=1", "whoever makes the store will say so"
    with pytest.raises(ConfigError, match=r"(?s)unknown option size='1'.*unknown option y='1'"):
        Config.load(values, environ={}, check_urls=True)
    assert Config.load({}, environ={}, check_urls=True).store == "memory://"


def test_what_is_no_url_is_said_once() -> None:
    with pytest.raises(ConfigError) as raised:
        load({"store": "nothing at all", "transport": "unknown://x", "codec": ""})
    said = str(raised.value)
    assert said.count("not a URL") == 1
    assert "transport: unknown transport 'unknown'" in said


def test_the_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_STAGING_BYTES", "64MiB")
    monkeypatch.setenv("KVPOOL_SAVE_ENABLED", "false")
    config = Config.load()
    assert (config.staging_bytes, config.save_enabled) == (64 << 20, False)


def test_a_store_may_be_a_table(tmp_path: Path) -> None:
    file = tmp_path / "kvpool.toml"
    file.write_text('[store]\nurl = "file:///kv"\nthreads = 8\n')
    assert load(file=file).store == {"url": "file:///kv", "threads": 8}


@pytest.mark.parametrize(
    ("values", "environ", "message"),
    [
        ({"stor": "x"}, {}, r"config: unknown option stor='x'; did you mean 'store'\? \(allowed: store, transport, "),
        ({}, {"KVPOOL_STOR": "x"}, r"environment variable KVPOOL_STOR: unknown option .*did you mean 'store'"),
        ({}, {"KVPOOL_": "x"}, "unknown option"),
        ({"save_enabled": "maybe"}, {}, r"save_enabled='maybe': .*\(allowed: true or false\)"),
        ({}, {"KVPOOL_LOAD_TIMEOUT_S": "0"}, r"variable KVPOOL_LOAD_TIMEOUT_S: load_timeout_s='0': .*seconds above 0"),
        ({"load_timeout_s": float("inf")}, {}, "finite"),
        ({"load_timeout_s": float("nan")}, {}, "finite|greater"),
        ({"lookup_timeout_ms": -1}, {}, r"lookup_timeout_ms=-1: .*\(allowed: milliseconds above 0\)"),
        ({"staging_bytes": "3GiBB"}, {}, r"staging_bytes='3GiBB': .*such as 256MiB"),
        ({"staging_bytes": 0}, {}, "staging_bytes=0"),
        ({"min_load_tokens": 1.5}, {}, "min_load_tokens=1.5"),
        ({"batch_bytes": "1GiB"}, {}, "batch_bytes=1073741824 must not exceed staging_bytes=268435456"),
        ({"event_loop": "uvloop"}, {}, r"event_loop='uvloop'.*asyncio or trio"),
        ({"store": "nothing at all"}, {}, "store='nothing at all': .*not a URL"),
        ({"store": {"path": "x"}}, {}, "store=.*needs the text 'url'"),
        ({"store": 3}, {}, "store=3: .*a store URL, or a table"),
        ({"transport": "a b"}, {}, "transport='a b'"),
        ({"codec": ""}, {}, "codec=''"),
    ],
)
def test_refusals(values: dict[str, object], environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(values, environ)


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load({"codecs": "x", "load_timeout_s": 0}, {"KVPOOL_TENNANT": "x", "KVPOOL_EVENT_LOOP": "x"})
    assert len(str(caught.value).splitlines()) == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"store = ", "not valid TOML"),
        (b"\xff", "not UTF-8"),
        (b"stor = 1", "unknown option stor=1"),
    ],
)
def test_a_bad_file_is_named(content: bytes | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "some.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{file}.*{message}"):
        load({}, {"KVPOOL_CONFIG": str(file)})


def test_a_folder_as_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"config file {tmp_path}: Is a directory"):
        load(file=tmp_path)


def test_secrets_never_show() -> None:
    config = load({"store": {"url": "redis://u:QZQ@h", "password": "QZQ"}, "transport": "zmq+tcp://h:1?secret=QZQ"})
    assert "redis://u:***@h" in repr(config)
    assert "QZQ" not in repr(config) + str(config)
    for value in ("redis://u:QZ#QZQ@h", {"url": "redis://u:QZQ@h:99999"}, {"password": "QZQ"}):
        with pytest.raises(ConfigError) as caught:
            load({"store": value})
        assert "QZQ" not in str(caught.value)


def test_secrets_in_nested_and_misplaced_urls_never_show() -> None:
    inner = "redis://:my QZQ@h"
    assert "QZQ" not in repr(load({"store": {"url": "guarded://", "store": inner}}))
    for values, environ in (
        ({"stor": inner}, {}),
        ({}, {"KVPOOL_STOR": inner}),
        ({}, {"KVPOOL_REDIS_AUTH": "QZQ"}),
        ({"store": [inner, {"password": "QZQ"}]}, {}),
        ({"store": "redis:/:QZQ@h"}, {}),
        ({"store": "redis+sentinel://h/s?sentinel_password=a&QZQ"}, {}),
    ):
        with pytest.raises(ConfigError, match=r"\*\*\*") as caught:
            load(dict(values), environ)
        assert "QZQ" not in str(caught.value)


def test_it_cannot_be_changed_by_accident() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().codec = "x"


def test_the_page_lists_every_field_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \|([^|]*)\|", page, re.MULTILINE))
    assert list(rows) == list(Config.model_fields)
    written = {name: text.strip(" `") for name, text in rows.items() if text.strip()}
    assert load(dict(written)) == load()
    assert {name for name in rows if name not in written} == {name for name, v in load() if v == ""}


@pytest.mark.parametrize("field", ["store", "transport"])
def test_a_text_that_is_no_url_is_shown_once_under_the_users_own_name(field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Config.load({field: "/var/cache/kv"}, environ={}, name="kv_connector_extra_config")
    said = str(raised.value)
    assert said.startswith(f"kv_connector_extra_config: {field}='/var/cache/kv': not a URL. ")
    assert said.count("'/var/cache/kv'") == 1
    assert field == "transport" or "file:///var/cache/kv" in said
