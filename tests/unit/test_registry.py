"""From a URL to a class: the forms, the refusals by name, and secrets that never show."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
import traceback
from importlib.metadata import EntryPoint
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ByteSize, Field, SecretStr

from kvpool import registry
from kvpool.backends.file import FileStore
from kvpool.backends.memory import MemoryStore
from kvpool.codec import HashCodec
from kvpool.errors import ConfigError
from kvpool.registry import URL, create_codec, create_store, create_transport, known_names, parse_url
from kvpool.transport import LookupTransport


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("memory://", URL("memory")),
        ("memory", URL("memory")),
        ("MEMORY://", URL("memory")),
        ("memory://?capacity=2GiB", URL("memory", params={"capacity": "2GiB"})),
        ("memory://name", URL("memory", "name")),
        ("file:///var/cache/kv?capacity=100GiB", URL("file", path="/var/cache/kv", params={"capacity": "100GiB"})),
        ("file:///a%20b/%25", URL("file", path="/a b/%")),
        ("my_pkg.mod:MyStore?x=1", URL("my_pkg.mod:MyStore", params={"x": "1"})),
        ("my_pkg.mod:MyStore", URL("my_pkg.mod:MyStore")),
        ("my_pkg.mod:MyStore://h:1/p?x=", URL("my_pkg.mod:MyStore", "h", 1, path="/p", params={"x": ""})),
        ("redis://u:p@h:6379/0?db=1", URL("redis", "h", 6379, "u", "p", "/0", {"db": "1"})),
        ("redis://:p%40%3Aw@h", URL("redis", "h", password="p@:w")),
        ("redis://:p@w@h", URL("redis", "h", password="p@w")),
        ("redis+unix:///run/redis.sock", URL("redis+unix", path="/run/redis.sock")),
        ("redis+sentinel://a:1,b:2/main", URL("redis+sentinel", "a:1,b:2", path="/main")),
        ("zmq+tcp://127.0.0.1:5555", URL("zmq+tcp", "127.0.0.1", 5555)),
        ("zmq+tcp://[::1]:5555", URL("zmq+tcp", "::1", 5555)),
        ("third_party://?a=b+c&d=%26", URL("third_party", params={"a": "b+c", "d": "&"})),
    ],
)
def test_forms(text: str, url: URL) -> None:
    assert parse_url(text) == url
    assert pickle.loads(pickle.dumps(parse_url(text))) == url
    assert parse_url(url) is url


def test_a_mapping_adds_options() -> None:
    url = parse_url({"url": "file:///kv?threads=2", "capacity": "1GiB", "x": 1, "y": 0.5, "z": True})
    assert url == URL(
        "file", path="/kv", params={"threads": "2", "capacity": "1GiB", "x": "1", "y": "0.5", "z": "true"}
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "not a URL"),
        ("no spaces://", "not a URL"),
        ("memory:/x", "not a URL"),
        ("memory://a#b", "%23"),
        ("memory://?capacity", "name=value"),
        ("memory://?a=1&a=2", "a is given twice"),
        ("x://h:99999", "up to 65535"),
        ("x://h:y", "host:port"),
        ({"capacity": 1}, "needs the text 'url'.*found: capacity"),
        ({"url": "memory://?a=1", "a": 2}, "a is given twice"),
        ({"url": "memory://", "a": [1]}, "option a must be text, a number or a boolean, not list"),
        ({"url": "memory://", "a": None}, "not NoneType"),
        (7, "not int"),
    ],
)
def test_what_is_no_url_is_refused(source: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_url(source)  # type: ignore[arg-type]


class Options(BaseModel):
    capacity: ByteSize | None = Field(None, description="a size, such as 2GiB")
    threads: int = Field(4, ge=1, description="1 or more")
    password: SecretStr | None = None
    needed: str = "x"


def test_options_are_parsed() -> None:
    options = parse_url("file:///kv?capacity=2GiB&threads=8").options(Options)
    assert (options.capacity, options.threads) == (2 << 30, 8)


def test_every_bad_option_is_named_with_value_and_what_is_allowed() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url("file:///kv?capcity=2GiB&threads=0&capacity=2GiBB&zzz=1").options(Options)
    text = str(caught.value)
    assert "unknown option capcity='2GiB'; did you mean 'capacity'? (allowed: capacity, threads, pass" in text
    assert "unknown option zzz='1' (allowed" in text
    assert "threads='0': should be greater than or equal to 1 (allowed: 1 or more)" in text
    assert "capacity='2GiBB': could not interpret byte unit: GiBB (allowed: a size, such as 2GiB)" in text


def test_a_missing_option_is_named() -> None:
    class Needs(BaseModel):
        path: str = Field(description="path of a file")

    class Nothing(BaseModel):
        pass

    with pytest.raises(ConfigError, match=r"option path is missing \(allowed: path of a file\)"):
        parse_url("x://").options(Needs)
    with pytest.raises(ConfigError, match="it takes no options"):
        parse_url("x://?a=1").options(Nothing)


# A secret with letters that no message contains by itself, and with what confuses a URL parser.
secrets = st.text(st.sampled_from("QXZ7/?#@:&%+ "), min_size=3, max_size=12).map(lambda s: f"QZQ{s}XQX")


@settings(deadline=None)
@given(
    secret=secrets, name=st.sampled_from(["password", "auth_token", "API_KEY", "client-secret", "sentinel_password"])
)
def test_secrets_never_show(secret: str, name: str) -> None:
    quoted = quote(secret, safe="")
    inner = f"redis://user:{quoted}@h?{name}={quoted}"
    sources: list[object] = [
        f"redis://user:{quoted}@host/0?threads=0",
        f"redis://user:{secret}@host",  # not quoted, as people do
        f"redis://host?{name}={quoted}&thread=0",
        {"url": "redis://host", name: secret, "thread": 0},
        f"wrap://?store={quote(inner, safe='')}&thread=0",
        f"wrap://?store={quote('wrap://?store=' + quote(inner, safe=''), safe='')}&capacity=x",
        {"url": "wrap://", "store": inner},
        {"url": "wrap://", "store": f"redis://user:{secret}@h"},  # not quoted, or by one level too few
        {"url": "wrap://", "store": f"redis://h?{name}={secret}"},
        f"wrap://?store={quote(f'redis://:{secret}@h', safe='')}&thread=0",
        f"wrap://?store={quote(f'redis://h?{name}={secret}', safe='')}&thread=0",
    ]
    for source in sources:
        shown = []
        try:
            url = parse_url(source)  # type: ignore[arg-type]
            shown += [repr(url), str(url), f"{url!r}"]
            url.options(Options)
        except ConfigError as error:
            shown += ["".join(traceback.format_exception(error, chain=True)).partition("ConfigError: ")[2], repr(error)]
        assert shown
        for text in shown:
            assert "QZQ" not in text, source
            assert "XQX" not in text, source


@pytest.mark.parametrize("name", ["key", "encryption_key", "signing-key", "secretkey", "pass", "auth", "credentials"])
def test_names_of_secrets(name: str) -> None:
    assert str(parse_url(f"x://?{name}=QZQ")) == f"x://?{name}=***"
    assert str(parse_url({"url": "x://", "inner": f"y://?{name}=QZ Q&z=1"})) == f"x://?inner=y://?{name}=***"


def test_what_is_no_secret_is_shown_and_a_user_alone_is_none_of_it() -> None:
    for text in (
        "x://h/a%20b%25?tokenizer=t&failed_key_ttl_s=3&a=b%26c%23%20d",
        "redis://user:***@h:1/0?x=***%40b",
        "redis+cluster://a:1,b:2",
        "file:///kv/a@b?threads=2",
        "x://?inner=memory://?capacity=2GiB",
    ):
        assert str(parse_url(text)) == text
    assert str(parse_url("redis://QZQ@h")) == "redis://***@h"
    for text in ("QZQ@host:6379", "redis://:1/QZQ@h"):  # the second was port 1 and a path
        with pytest.raises(ConfigError, match="not a URL") as caught:
            parse_url(text)
        assert "QZQ" not in str(caught.value)


@pytest.mark.parametrize("bad", ["%00", "%0a", "%7F", "%ff", "%ED%B3%BF", "\udcff", "\x1b", "\n"])
def test_what_is_no_text_is_refused(bad: str) -> None:
    for form in ("x:///a{}b", "x://{}@h", "x://u:QZQ{}@h", "x://h{}", "x://h?a{}=1", "x://?a={}"):
        with pytest.raises(ConfigError, match=r"'x://.*: a URL holds no control characters") as caught:
            parse_url(form.format(bad))
        assert "QZQ" not in str(caught.value)
        assert str(caught.value).isprintable()
    with pytest.raises(ConfigError, match="x://: option 'a' must not hold control characters"):
        parse_url({"url": "x://", "a": "\udcff"})


def test_a_bad_secret_is_refused_without_being_shown() -> None:
    class Strict(BaseModel):
        password: str = Field(max_length=3)

    with pytest.raises(ConfigError, match=r"password=\*\*\*: String should have at most 3") as caught:
        parse_url({"url": "x://", "password": "hidden"}).options(Strict)
    assert "hidden" not in "".join(traceback.format_exception(caught.value)).partition("ConfigError:")[2]
    assert caught.value.__cause__ is None


# ---- from a name to a class


def test_built_in_names() -> None:
    assert isinstance(create_store("memory://?capacity=1MiB"), MemoryStore)
    assert isinstance(create_store({"url": "file:///nowhere", "threads": 2}), FileStore)
    for name in known_names("transports"):
        assert isinstance(
            create_transport(f"{name}://127.0.0.1:5555" if "tcp" in name else f"{name}://"), LookupTransport
        )
    for name in known_names("codecs"):
        codec = create_codec(name)
        assert isinstance(codec, HashCodec)
        assert codec.name == name


def test_unknown_names_list_what_is_known() -> None:
    with pytest.raises(ConfigError, match=r"unknown store 'memroy'; did you mean 'memory'\? \(known: .*file, .*memory"):
        create_store("memroy://")
    with pytest.raises(ConfigError, match=r"unknown transport 'file' \(known: inprocess, zmq\+ipc, zmq\+tcp"):
        create_transport("file:///x")
    with pytest.raises(ConfigError, match=r"unknown codec 'binray'; did you mean 'binary'\?"):
        create_codec("binray")


def test_what_cannot_be_loaded_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_kv.py").write_text("1 / 0")
    (tmp_path / "leaving_kv.py").write_text("raise SystemExit(3)")
    (tmp_path / "needy_kv.py").write_text("import surely_not_installed.inner")
    for source, message in [
        ("no_such_pkg.mod:Store", "no module 'no_such_pkg'"),
        ("kvpool.nothing:Store", "no module 'kvpool.nothing'"),
        ("kvpool.backends.memory:MemoryStor", "has no class 'MemoryStor'; did you mean 'MemoryStore'"),
        ("kvpool.registry:URL", "kvpool.registry:URL is not a subclass of kvpool.store.Store"),
        ("kvpool.registry:create_store", "is not a subclass of kvpool.store.Store"),
        ("leaving_kv:Store", "importing leaving_kv failed: SystemExit: 3"),
        ("broken_kv:Store", "importing broken_kv failed: ZeroDivisionError"),
        ("needy_kv:Store", "needs the module 'surely_not_installed', which is not installed: install the package"),
    ]:
        with pytest.raises(ConfigError, match=message):
            create_store(source)


def test_what_a_class_makes_of_a_url_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryStore, "from_url", lambda url: None)
    with pytest.raises(ConfigError, match=r"memory://n: its from_url gave NoneType, not a kvpool.store.Store"):
        create_store("memory://n")
    monkeypatch.setattr(LookupTransport, "from_url", lambda url: MemoryStore(), raising=False)
    monkeypatch.setattr(registry, "_find", lambda *_: LookupTransport)
    with pytest.raises(
        ConfigError, match=r"x://: its from_url gave MemoryStore, not a kvpool.transport.LookupTransport"
    ):
        create_transport("x://")


def test_a_missing_driver_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "on_torch.py").write_text("import torch.nn")
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "torch.nn", None)
    with pytest.raises(ConfigError, match=r"'torch.*not installed: pip install 'kvpool\[torch\]'"):
        create_store("on_torch:Store")


def test_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = "kvpool.backends.memory:MemoryStore"
    found = {
        "kvpool.stores": [
            EntryPoint("near", memory, "kvpool.stores"),
            EntryPoint("twice", memory, "kvpool.stores"),
            EntryPoint("twice", "other:Store", "kvpool.stores"),
            EntryPoint("file", memory, "kvpool.stores"),
        ]
    }
    monkeypatch.setattr(registry, "entry_points", lambda group: found.get(group, []))
    registry._entry_points.cache_clear()
    try:
        assert isinstance(create_store("near://"), MemoryStore)
        assert {"file", "memory", "near", "twice"} <= set(known_names("stores"))
        with pytest.raises(ConfigError, match=r"'twice' is registered more than once: kvpool.*, other:Store"):
            create_store("twice://")
        assert isinstance(create_store("file:///x"), FileStore), "a built-in name was taken over"
    finally:
        monkeypatch.undo()
        registry._entry_points.cache_clear()


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    code = """
        import sys
        import kvpool.config, kvpool.registry, kvpool.testing
        kvpool.registry.parse_url("file:///x")
        loaded = [m for m in sys.modules if m.startswith(("kvpool.backends", "kvpool.protocols", "torch", "vllm",
                  "zmq", "pytest", "hypothesis", "trio"))]
        sys.exit(", ".join(loaded) or 0)
    """
    root = Path(registry.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=root, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
