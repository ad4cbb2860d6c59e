"""The one configuration of kvpool, validated as a whole before anything is opened.

Sources, strongest first: values given by the caller (a dict, such as an engine's extra config), environment variables
``KVPOOL_<FIELD>``, a TOML file (named by ``config_file`` or ``KVPOOL_CONFIG``), the defaults.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator, model_validator

from kvpool._options import validate
from kvpool.errors import ConfigError
from kvpool.registry import create_store, create_transport, parse_url

__all__ = ["Config"]

_PREFIX = "KVPOOL_"
_FILE_VARIABLE = "KVPOOL_CONFIG"

Bytes = Annotated[ByteSize, Field(gt=0, description="a size above 0, such as 256MiB")]
Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False, description="milliseconds, 0 or more")]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False, description="seconds, 0 or more")]
Timeout = Annotated[float, Field(gt=0, allow_inf_nan=False, description="seconds above 0")]


class Config(BaseModel):
    """How one engine uses the pool. Build it with :meth:`load`; each name carries its unit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    #: Where values are kept: a store URL, or a table with a ``url`` and the URL's options beside it.
    store: str | dict[str, Any] = Field(
        default="memory://", description="a store URL, or a table with 'url' and its options"
    )
    #: How a lookup reaches the store's process: a transport URL. Empty: the engine adapter chooses.
    transport: str = Field(default="", description="a transport URL, or empty for the adapter's choice")
    #: How hashes are written inside a lookup; both ends must agree.
    codec: str = Field(default="binary", min_length=1, description="a codec name, or module:Class")
    #: Host memory for values on their way in and out.
    staging_bytes: Bytes = ByteSize(256 << 20)
    #: While more than this waits to be saved, further saves are dropped.
    save_queue_bytes: Bytes = ByteSize(1 << 30)
    #: Bytes moved by one call to the store.
    batch_bytes: Bytes = ByteSize(8 << 20)
    #: A lookup without an answer by then is a miss.
    lookup_timeout_ms: Annotated[float, Field(gt=0, allow_inf_nan=False, description="milliseconds above 0")] = 200.0
    #: How long the engine's scheduler may wait inside one call for an answer that is about to come.
    lookup_grace_ms: Milliseconds = 1.0
    #: A load that is not complete and proven by then has failed.
    load_timeout_s: Timeout = 10.0
    #: A save that is not done by then is given up.
    save_timeout_s: Timeout = 30.0
    #: A store call this long past its deadline is left behind; it keeps its staging memory until it ends.
    deadline_grace_s: Seconds = 0.25
    #: How long an answered lookup may be relied on without asking again.
    max_age_s: Seconds = 1.0
    #: A hit that spares fewer tokens than this is not loaded.
    min_load_tokens: int = Field(default=0, ge=0, description="tokens, 0 or more")
    #: A chunk is stored when it is to be saved for this many times: 2 keeps prompts that come once out of the store.
    save_after_uses: int = Field(default=1, ge=1, description="a count, 1 or more")
    #: Whether this engine stores what it computes.
    save_enabled: bool = Field(default=True, description="true or false")
    #: Whether answers are stored too, block by block as they are generated, and not only prompts.
    save_decoded: bool = Field(default=False, description="true or false")
    #: Whether this engine loads what is stored.
    load_enabled: bool = Field(default=True, description="true or false")
    #: How long a key that failed to load counts as absent.
    failed_key_ttl_s: Seconds = 30.0
    #: Engines of different tenants never share values.
    tenant: str = Field(default="", description="any text")
    #: Engines with equal labels share values; empty: a random epoch after each reset, a common one before.
    epoch_label: str = Field(default="", description="any text")
    #: Says which weights are loaded, in place of a fingerprint of the weight files.
    model_fingerprint: str = Field(default="", description="any text")
    #: The event loop of kvpool's own thread.
    event_loop: Literal["asyncio", "trio"] = Field(default="asyncio", description="asyncio or trio")

    @classmethod
    def load(
        cls,
        values: Mapping[str, Any] | None = None,
        *,
        config_file: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
        name: str = "config",
        check_urls: bool = False,
    ) -> Self:
        """The configuration from all sources; ``values`` may name the file as ``config_file`` too.

        ``environ``: the environment to read, the process's own by default. ``name``: what the user knows ``values``
        as, for messages. Raises :class:`~kvpool.errors.ConfigError` that names each bad field, where it was set, its
        value and what is allowed, and with it what is wrong in the options of store and transport. ``check_urls``:
        raise for those alone as well; else whoever makes the store finds them.
        """
        given = dict(values or {})
        if bad := [field for field in given if not isinstance(field, str)]:
            raise ConfigError(f"{name}: field names must be text, not {bad[0]!r}")
        environ = os.environ if environ is None else environ
        file = given.pop("config_file", None) or config_file or environ.get(_FILE_VARIABLE)
        if file and not isinstance(file, str | os.PathLike):
            raise ConfigError(f"config_file={file!r}: must be the path of a TOML file")
        merged: dict[str, Any] = {}
        origin: dict[str, str] = {}
        layers: list[tuple[Mapping[str, Any], str]] = [(_from_file(Path(file)), str(file))] if file else []
        layers += [(dict(_from_environment(environ)), "environment"), (given, name)]
        for layer, place in layers:
            merged |= layer
            origin |= dict.fromkeys(layer, place)

        def where(field: str) -> str:
            place = origin.get(field, name)
            return f"environment variable {_PREFIX}{field.upper()}" if place == "environment" else place

        config, problems = None, []
        try:
            config = validate(cls, merged, where)
        except ConfigError as error:
            problems.append(str(error))
        if config is None or check_urls:
            problems += _problems_of_urls(merged, where)
        if config is None or problems:
            raise ConfigError("\n".join(problems))
        return config

    @field_validator("store")
    @classmethod
    def _store_is_a_url(cls, value: str | dict[str, Any]) -> str | dict[str, Any]:
        _check_url(value)
        return value

    @field_validator("transport")
    @classmethod
    def _transport_is_a_url(cls, value: str) -> str:
        if value:
            _check_url(value)
        return value

    @model_validator(mode="after")
    def _batches_fit(self) -> Self:
        if self.batch_bytes > self.staging_bytes:
            raise ValueError(f"batch_bytes={self.batch_bytes} must not exceed staging_bytes={self.staging_bytes}")
        return self

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        # URLs carry passwords; their own text form hides them.
        for name, value in super().__repr_args__():
            yield name, str(parse_url(value)) if value and name in ("store", "transport") else value


def _check_url(value: str | dict[str, Any]) -> None:
    try:
        parse_url(value)
    except ConfigError as error:  # the value stands in front of the message already
        raise ValueError(str(error).partition("...: ")[2] or str(error)) from None


def _problems_of_urls(values: Mapping[str, Any], where: Callable[[str], str]) -> Iterator[str]:
    """What is wrong with what the URLs name; that one is no URL has been said."""
    for name, create in (("store", create_store), ("transport", create_transport)):
        try:
            url = parse_url(values.get(name) or "")
        except ConfigError:
            continue
        try:
            create(url)
        except ConfigError as error:
            yield f"{where(name)}: {name}: {error}"


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for variable, value in environ.items():
        if variable.startswith(_PREFIX) and variable != _FILE_VARIABLE:
            yield variable.removeprefix(_PREFIX).lower(), value


def _from_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            return tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror or error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"config file {path}: not valid TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file {path}: not UTF-8 text") from error
    except ValueError as error:  # a NUL in the path
        raise ConfigError(f"config file {str(path)!r}: {error}") from error
