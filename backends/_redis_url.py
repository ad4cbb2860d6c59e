"""From a URL to servers and settings; everything that can be wrong with it is said at the start."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, replace

from pydantic import BaseModel, ByteSize, Field

from kvpool.backends._file_format import HEADER_BYTES, Checksum
from kvpool.backends._redis_link import Address
from kvpool.backends._redis_servers import Cluster, OneServer, Pool, Servers, through_sentinels
from kvpool.backends._redis_wire import Access, Connection
from kvpool.errors import ConfigError
from kvpool.registry import URL

__all__ = ["Settings", "settings_of"]

_MAX_VALUE = (512 << 20) - HEADER_BYTES  # Redis takes strings of up to 512 MiB
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]\s]+)(?::(\d{1,5}))?")


class _Options(BaseModel):
    prefix: str = Field(
        default="kvpool:", pattern=r"^[!-z|~]{0,64}$", description="up to 64 visible ASCII characters but { and }"
    )
    ttl: float | None = Field(
        default=None, ge=0.001, le=1e9, description="seconds after which a value expires; without it never"
    )
    timeout: float = Field(default=5.0, gt=0, le=3600, description="seconds, above 0, up to 3600")
    connections: int = Field(default=8, ge=2, le=256, description="connections to a server, 2 to 256")
    checksum: Checksum = Field(default="xxh3_64", description="xxh3_64 or none")
    max_value: ByteSize = Field(
        default=ByteSize(_MAX_VALUE), ge=1, le=_MAX_VALUE, description=f"a size of 1 to {_MAX_VALUE} bytes"
    )


class _Database(_Options):
    db: int = Field(default=0, ge=0, description="a database number")


class _Sentinels(_Database):
    sentinel_username: str = Field(default="", description="the user for the Sentinels themselves")
    sentinel_password: str = Field(default="", description="the password for the Sentinels themselves")


class _TLS(_Options):
    tls_ca: str = Field(default="", description="a PEM file of certificates to trust instead of the system's")
    tls_cert: str = Field(default="", description="a PEM file with the client's certificate")
    tls_key: str = Field(default="", description="a PEM file with the key of tls_cert, not encrypted")
    tls_hostname: str = Field(default="", description="the name in the server's certificate, if not the URL's host")


class _SecureSentinels(_Sentinels, _TLS):
    pass


_FORMS: dict[str, tuple[str, type[_Options]]] = {
    "redis": ("redis://[user:password@]host[:port][/db]", _Options),
    "rediss": ("rediss://[user:password@]host[:port][/db]", _TLS),
    "redis+unix": ("redis+unix://[user:password@]/path/to/socket", _Database),
    "redis+sentinel": ("redis+sentinel://[user:password@]host[:port],host[:port]/service", _Sentinels),
    "rediss+sentinel": ("rediss+sentinel://[user:password@]host[:port],host[:port]/service", _SecureSentinels),
    "redis+cluster": ("redis+cluster://[user:password@]host[:port],host[:port]", _Options),
    "rediss+cluster": ("rediss+cluster://[user:password@]host[:port],host[:port]", _TLS),
}


@dataclass(frozen=True)
class Settings:
    """What a URL says. ``place``: the servers, to be named in messages. ``ttl_ms``: None for no limit."""

    servers: Servers
    place: str
    prefix: str
    ttl_ms: int | None
    max_value: int
    timeout: float
    checksum: Checksum


def settings_of(url: URL) -> Settings:
    """Raises :class:`~kvpool.errors.ConfigError` that names the field, the value and what is allowed."""
    if url.scheme not in _FORMS:
        raise ConfigError(f"{url}: a redis store is one of {', '.join(form for form, _ in _FORMS.values())}")
    form, model = _FORMS[url.scheme]
    options = url.options(model)
    access = Access(url.username, url.password, timeout=options.timeout)
    if isinstance(options, _TLS):
        access = replace(access, tls=_tls_context(url, options), tls_hostname=options.tls_hostname)
    if isinstance(options, _Database):
        access = replace(access, db=options.db)
    servers: Servers
    kind = url.scheme.replace("rediss", "redis")
    if kind == "redis+cluster":
        if url.path.strip("/"):
            raise ConfigError(f"{url}: a cluster has no databases, so no path; write {form}")
        seeds = _addresses(url, 6379, form)
        place, servers = _shown(seeds), Cluster(seeds, access, options.connections)
    elif isinstance(options, _Sentinels):
        service = url.path.strip("/")
        if not service or "/" in service:
            raise ConfigError(f"{url}: the name of the service must be the path; write {form}")
        sentinels = _addresses(url, 26379, form)
        login = replace(access, username=options.sentinel_username, password=options.sentinel_password, db=0)
        connect = through_sentinels(sentinels, service, login, access)
        place, servers = f"{service} of {_shown(sentinels)}", OneServer(Pool(connect, options.connections))
    else:
        if kind == "redis+unix":
            if url.host or url.port is not None or not url.path.strip("/"):
                raise ConfigError(f"{url}: the absolute path of a socket is needed; write {form}")
            address = Address(url.path)
        else:
            if not re.fullmatch(r"/?|/\d{1,9}", url.path):
                raise ConfigError(f"{url}: the path {url.path!r} is not the number of a database; write {form}")
            access = replace(access, db=int(url.path.strip("/") or 0))
            if "," in url.host:
                raise ConfigError(f"{url}: several hosts are a cluster ({_FORMS['redis+cluster'][0]}) or Sentinels")
            address = Address(url.host or "localhost", 6379 if url.port is None else url.port)
        place, servers = str(address), OneServer(Pool(lambda: Connection.open(address, access), options.connections))
    ttl_ms = None if options.ttl is None else round(options.ttl * 1000)
    return Settings(servers, place, options.prefix, ttl_ms, int(options.max_value), options.timeout, options.checksum)


def _addresses(url: URL, port: int, form: str) -> list[Address]:
    """The hosts of a list "a:1,b:2", or the one host."""
    if "," not in url.host:
        if not url.host:
            raise ConfigError(f"{url}: no host; write {form}")
        return [Address(url.host, port if url.port is None else url.port)]
    found = []
    for item in url.host.split(","):
        match = _HOST.fullmatch(item)
        if match is None or int(match[2] or 0) > 65535:
            raise ConfigError(f"{url}: {item!r} is not host:port with a port up to 65535; write {form}")
        found.append(Address(match[1].strip("[]"), int(match[2] or port)))
    return found


def _shown(addresses: list[Address]) -> str:
    return ",".join(map(str, addresses))


def _tls_context(url: URL, options: _TLS) -> ssl.SSLContext:
    field, value = "tls_ca", options.tls_ca
    try:
        context = ssl.create_default_context(cafile=value or None)
        field, value = "tls_cert", options.tls_cert
        if options.tls_key and not options.tls_cert:
            raise ConfigError(f"{url}: tls_key is given without tls_cert")
        if options.tls_cert:
            # Without a password OpenSSL would ask for that of an encrypted key on the terminal.
            context.load_cert_chain(options.tls_cert, options.tls_key or None, password=lambda: "")
    except OSError as error:
        allowed = _TLS.model_fields[field].description
        raise ConfigError(f"{url}: {field}={value!r}: {error.strerror or error} (allowed: {allowed})") from error
    return context
