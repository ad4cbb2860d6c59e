"""From a URL, an entry point or "module:Class" to a store, a lookup transport or a hash codec.

Nothing is imported before it is asked for, so a backend's driver is only needed by those who use it. A third party
registers a scheme through the entry-point groups ``kvpool.stores``, ``kvpool.transports`` and ``kvpool.codecs``,
or is named straight in the URL: ``my_pkg.mod:MyStore?x=1``.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote, unquote

from kvpool._options import M, did_you_mean, is_secret, redact_value, validate
from kvpool.errors import ConfigError
from kvpool.store import Store

if TYPE_CHECKING:
    from kvpool.codec import HashCodec
    from kvpool.transport import LookupTransport

__all__ = ["URL", "create_codec", "create_store", "create_transport", "known_names", "parse_url"]

T = TypeVar("T")

#: What ships with kvpool: group -> name -> "module:Class".
_BUILTIN: Mapping[str, Mapping[str, str]] = {
    "stores": {
        "memory": "kvpool.backends.memory:MemoryStore",
        "file": "kvpool.backends.file:FileStore",
        "mooncake": "kvpool.backends.mooncake:MooncakeStore",
        **dict.fromkeys(
            ["redis", "rediss", "redis+unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster"],
            "kvpool.backends.redis:RedisStore",
        ),
        "checked": "kvpool.backends.checked:CheckedStore",
        "guarded": "kvpool.backends.guarded:GuardedStore",
        "tiered": "kvpool.backends.tiered:TieredStore",
    },
    "transports": {
        "inprocess": "kvpool.protocols.inprocess:InProcessTransport",
        "zmq+ipc": "kvpool.protocols.zmq:ZmqTransport",
        "zmq+tcp": "kvpool.protocols.zmq:ZmqTransport",
    },
    "codecs": {
        "binary": "kvpool.protocols.binary:BinaryCodec",
    },
}
#: Top-level module that may be missing -> the pip extra that brings it.
_EXTRAS = {"torch": "torch", "pytest": "testing", "hypothesis": "testing"}

_EXAMPLE_CLASS = "my_pkg.mod:Class"
_CLASS = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"
_FORM = re.compile(
    rf"(?P<scheme>{_CLASS}|[A-Za-z][A-Za-z0-9+._-]*)"
    r"(?:://(?:(?P<user>[^/?#]*)@)?(?P<place>[^/?#@]*)(?P<path>/[^?#]*)?)?"
    r"(?:\?(?P<query>[^#]*))?"
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
#: Where the servers of stores listen if nobody says otherwise, for the advice on a text that names no scheme.
_PORTS = {"6379": "redis://{}", "26379": "redis+sentinel://{}/service", "50051": "mooncake://{}"}
_BARE = re.compile(r"((?:[\w.-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})|\d{1,3}(?:\.\d{1,3}){3})(?:[/?][^@]*)?")
_PLACE = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^:,\[\]]*)(?::(?P<port>\d{1,5}))?")


@dataclass(frozen=True, slots=True)
class URL:
    """Where something lives and how it is set up. ``str`` is a URL again, with ``***`` for secrets, and so is ``repr``.

    ``scheme`` is a registered name or "module:Class". ``host`` of a list ("a:1,b:2") is kept whole, with no ``port``.
    Everything is percent-decoded. ``params``: the query (and what a mapping adds), as text.
    """

    scheme: str
    host: str = ""
    port: int | None = None
    username: str = ""
    password: str = field(default="", repr=False)
    path: str = ""
    params: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        # A user without a password may be a token.
        user = f"{_quoted(self.username)}:***@" if self.password else "***@" if self.username else ""
        host = f"[{self.host}]" if ":" in self.host and "," not in self.host else _quoted(self.host, ":,")
        at = "" if user else "@"
        place = user + host + (f":{self.port}" if self.port is not None else "")
        place += _quoted(self.path, "/:,=" + ("" if place else "@"))
        params = {k: "***" if is_secret(k) else redact_value(v) for k, v in self.params.items()}
        query = "&".join(f"{_quoted(k)}={_quoted(v, '/:,=?[]' + at)}" for k, v in params.items())
        return self.scheme + (f"://{place}" if place or ":" not in self.scheme else "") + (f"?{query}" if query else "")

    def __repr__(self) -> str:
        return f"URL({str(self)!r})"

    def options(self, model: type[M]) -> M:
        """The params as a pydantic model, whose field names are the allowed options.

        Raises :class:`~kvpool.errors.ConfigError` that names each bad field, its value and what is allowed.
        """
        return validate(model, self.params, lambda _: str(self))


def parse_url(source: str | Mapping[str, object] | URL) -> URL:
    """A URL from its text, or from a mapping ``{"url": text, **params}``.

    Raises :class:`~kvpool.errors.ConfigError`; the message never shows a secret.
    """
    if isinstance(source, URL):
        return source
    if isinstance(source, str):
        return _parse_text(source)
    if not isinstance(source, Mapping):
        raise ConfigError(f"a URL is text or a mapping with a 'url', not {type(source).__name__}")
    extra = dict(source)
    text = extra.pop("url", None)
    if not isinstance(text, str):
        raise ConfigError(f"a mapping that describes a URL needs the text 'url' (found: {', '.join(map(str, source))})")
    url = _parse_text(text)
    params = dict(url.params)
    for name, value in extra.items():
        if name in params:
            raise ConfigError(f"{url}: option {name} is given twice, in the URL and beside it")
        if isinstance(value, bool):
            value = "true" if value else "false"
        if not isinstance(value, str | int | float):
            raise ConfigError(f"{url}: option {name} must be text, a number or a boolean, not {type(value).__name__}")
        if _CONTROL.search(f"{name}{value}"):
            raise ConfigError(f"{url}: option {name!r} must not hold control characters, in name or value")
        params[str(name)] = str(value)
    return replace(url, params=params)


def _quoted(part: str, also: str = "") -> str:
    return quote(part, safe="*+!$'();" + also, errors="replace")


def _decoded(part: str | None, text: str) -> str:
    """A part of the URL ``text``, percent-decoded."""
    try:
        plain = unquote(part or "", errors="strict")
    except UnicodeDecodeError:
        plain = "\0"
    if _CONTROL.search(plain):
        raise ConfigError(
            f"{redact_value(text)!r}: a URL holds no control characters, and percent-escapes of UTF-8 only"
        )
    return plain


def _parse_text(text: str) -> URL:
    form = _FORM.fullmatch(text)
    user = form["user"] if form else None
    if (
        form is None
        or ("@" in (form["path"] or "") and (user is not None or form["place"]))
        or (user is not None and "@" in (form["query"] or ""))
    ):
        # The text may hold a secret in the wrong place: show no more than its scheme.
        raise ConfigError(f"{redact_value(text.partition(':')[0])!r}...: not a URL. {_advice(text)}")
    scheme = form["scheme"] if ":" in form["scheme"] else form["scheme"].lower()
    username, _, password = (user or "").partition(":")
    place = form["place"] or ""
    host, port = place, None
    if "," not in place:
        split = _PLACE.fullmatch(place)
        if split is None or int(split["port"] or 0) > 65535:
            raise ConfigError(f"{scheme}://...: host and port must be host:port with a port up to 65535")
        host, port = split["host"].strip("[]"), int(split["port"]) if split["port"] else None
    params: dict[str, str] = {}
    for pair in filter(None, (form["query"] or "").split("&")):
        name, equals, value = pair.partition("=")
        name = _decoded(name, text)
        if not equals or not name:
            raise ConfigError(f"{scheme}://...: each option is written name=value; & inside a value as %26")
        if name in params:
            raise ConfigError(f"{scheme}://...: option {name} is given twice")
        params[name] = _decoded(value, text)
    host, username, password, path = (_decoded(part, text) for part in (host, username, password, form["path"]))
    return URL(scheme, host, port, username, password, path, params)


def _advice(text: str) -> str:
    """How a text that is no URL should have been written."""
    if text.startswith(("/", ".", "~")) and "@" not in text:
        path = os.path.abspath(os.path.expanduser(text.partition("?")[0]))
        return f"A folder is written file:// and its absolute path: file://{quote(path)}"
    if bare := _BARE.fullmatch(text):
        meant = [_PORTS[bare[2]]] if bare[2] in _PORTS else ["redis://{}", "mooncake://{}"]
        return f"A URL begins with a scheme. For a store, write {' or '.join(meant).replace('{}', bare[1])}"
    scheme, colon, rest = text.partition(":")
    if colon and not rest.startswith("//") and scheme.lower() in _BUILTIN["stores"]:
        return f"Write {_example(scheme.lower())}"
    return (
        "Write scheme://host/path?option=value or my_pkg.mod:Class?option=value, and a # ? / @ that does not part "
        "these as %23 %3F %2F %40"
    )


def _example(scheme: str) -> str:
    return "file:///absolute/path" if scheme == "file" else f"{scheme}://..."


def create_store(source: str | Mapping[str, object] | URL) -> Store:
    """A closed store. Raises :class:`~kvpool.errors.ConfigError`."""
    url = parse_url(source)
    return _made(_find("stores", url.scheme, Store).from_url(url), url, Store)  # type: ignore[type-abstract]


def create_transport(source: str | Mapping[str, object] | URL) -> LookupTransport:
    """A lookup transport. Raises :class:`~kvpool.errors.ConfigError`."""
    from kvpool.transport import LookupTransport

    url = parse_url(source)
    found = _find("transports", url.scheme, LookupTransport)  # type: ignore[type-abstract]
    return _made(found.from_url(url), url, LookupTransport)  # type: ignore[type-abstract]


def create_codec(name: str) -> HashCodec:
    """A hash codec by its name ("binary") or "module:Class". Raises :class:`~kvpool.errors.ConfigError`."""
    from kvpool.codec import HashCodec

    return _find("codecs", name, HashCodec)()  # type: ignore[type-abstract]


def _made(made: object, url: URL, interface: type[T]) -> T:
    """What a class of a third party has made, if it is what it must be."""
    if not isinstance(made, interface):
        raise ConfigError(
            f"{url}: its from_url gave {type(made).__name__}, not a {interface.__module__}.{interface.__name__}"
        )
    return made


def known_names(group: str) -> list[str]:
    """The names that a URL may begin with: built in and through entry points.

    ``group``: "stores", "transports" or "codecs".
    """
    return sorted({*_BUILTIN[group], *(e.name for e in _entry_points(group))})


@cache
def _entry_points(group: str) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=f"kvpool.{group}"))


def _find(group: str, name: str, interface: type[T]) -> type[T]:
    """The class behind ``name``; a built-in name cannot be taken over by an entry point."""
    what = group.removesuffix("s")
    if ":" in name:
        target = name
        if (scheme := name.partition(":")[0].lower()) in _BUILTIN[group]:
            raise ConfigError(f"{what} {name!r}: not a URL. Write {_example(scheme)}; {_EXAMPLE_CLASS} names a class")
    elif name in _BUILTIN[group]:
        target = _BUILTIN[group][name]
    else:
        found = {f"{e.module}:{e.attr}" for e in _entry_points(group) if e.name == name}
        if not found:
            known = known_names(group)
            folder = "; a folder is written file:///absolute/path" if group == "stores" else ""
            raise ConfigError(
                f"unknown {what} {name!r}{did_you_mean(name, known)} "
                f"(known: {', '.join(known)}{folder}; or write module:Class, or install a package that registers it)"
            )
        if len(found) > 1:
            raise ConfigError(f"{what} {name!r} is registered more than once: {', '.join(sorted(found))}")
        (target,) = found
    loaded = _load(what, name, target)
    if not (isinstance(loaded, type) and issubclass(loaded, interface)):
        raise ConfigError(f"{what} {name!r}: {target} is not a subclass of {interface.__module__}.{interface.__name__}")
    return loaded


def _load(what: str, name: str, target: str) -> object:
    module, _, attribute = target.partition(":")
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        if module == missing or module.startswith(f"{missing}."):
            raise ConfigError(
                f"{what} {name!r}: no module {missing!r} (is it installed, or misspelt? A file of your own is found if "
                "its folder is on Python's path, by PYTHONPATH=/the/folder)"
            ) from None
        extra = _EXTRAS.get(missing.partition(".")[0])
        install = f"pip install 'kvpool[{extra}]'" if extra else f"install the package that provides {missing!r}"
        raise ConfigError(f"{what} {name!r} needs the module {missing!r}, which is not installed: {install}") from error
    except (Exception, SystemExit) as error:  # any module may be named here, so anything may go wrong in it
        raise ConfigError(f"{what} {name!r}: importing {module} failed: {type(error).__name__}: {error}") from error
    try:
        return getattr(loaded, attribute)
    except AttributeError:
        near = did_you_mean(attribute, vars(loaded))
        raise ConfigError(f"{what} {name!r}: module {module} has no class {attribute!r}{near}") from None
