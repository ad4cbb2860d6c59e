"""CURVE keys of a ZeroMQ lookup channel: both ends prove who they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import Buffer
from zmq.auth import load_certificate
from zmq.utils import z85

from kvpool.errors import ConfigError
from kvpool.registry import URL

__all__ = ["ZAP_ENDPOINT", "Keys", "load_keys"]

#: Where a ROUTER with CURVE asks about each client that knocks (ZeroMQ RFC 27).
ZAP_ENDPOINT = "inproc://zeromq.zap.01"


@dataclass(frozen=True, slots=True)
class Keys:
    """``own``: public and secret key, ``server``: public key, in Z85. ``clients``: public keys of 32 raw bytes."""

    own: tuple[bytes, bytes]
    server: bytes | None
    clients: frozenset[bytes] | None

    def authorize(self, question: Sequence[Buffer]) -> list[bytes]:
        """The answer to one question about a client: 200 if its key is known, else 400 (ZeroMQ RFC 27)."""
        version, request_id, _domain, _address, _identity, mechanism, *credentials = map(bytes, question)
        known = mechanism == b"CURVE" and credentials[0] in (self.clients or ())
        return [version, request_id, *((b"200", b"") if known else (b"400", b"unknown key")), b"", b""]


def load_keys(url: URL, own: Path | None, server: Path | None, clients: Path | None) -> Keys | None:
    """The keys behind curve_keys, curve_server and curve_clients. Raises ConfigError that names option and file."""
    if own is None:
        if server or clients:
            raise ConfigError(f"{url}: curve_server and curve_clients need curve_keys, this end's own key pair")
        return None
    if not (server or clients):
        raise ConfigError(f"{url}: curve_keys needs curve_server (for a client) or curve_clients (for a server)")
    public, secret = _certificate(url, "curve_keys", own)
    if secret is None:
        raise ConfigError(f"{url}: curve_keys={own} holds no secret key; it is the *.key_secret of the two files")
    files = sorted(clients.glob("*.key")) if clients else []
    if clients and not files:
        raise ConfigError(f"{url}: curve_clients={clients} is no directory with *.key certificates")
    return Keys(
        (public, secret),
        _certificate(url, "curve_server", server)[0] if server else None,
        frozenset(z85.decode(_certificate(url, "curve_clients", f)[0]) for f in files) if clients else None,
    )


def _certificate(url: URL, option: str, path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = load_certificate(path)
        if any(len(z85.decode(key)) != 32 for key in (public, secret) if key is not None):
            raise ValueError("a key is not 40 characters of Z85")
    except (OSError, ValueError, KeyError) as error:
        text = "no valid certificate" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{url}: {option}={path}: {text}") from None  # the cause may show key material
    return public, secret
