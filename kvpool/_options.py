"""Turns pydantic's findings into one readable ConfigError, and keeps secrets out of every text."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar
from urllib.parse import unquote

from pydantic import BaseModel, ValidationError

from kvpool.errors import ConfigError

__all__ = ["did_you_mean", "is_secret", "redact", "redact_value", "validate"]

M = TypeVar("M", bound=BaseModel)

# Hides too much rather than too little; "tokens", "tokenizer" and "key_ttl" are no secrets.
_SECRET = r"passw(?:or)?d|passphrase|pwd|secret|credential|token(?!s|iz)|(?:api|access|private)[_-]?key"
_SECRET_END = r"key|pass|auth"
_SECRET_NAME = re.compile(rf"{_SECRET}|(?:{_SECRET_END})\Z", re.IGNORECASE)
# In the words of a message, which go on behind a URL: percent-encoded, once a level (%3A, %253A).
_USERINFO_IN_TEXT = re.compile(r"(:|%(?:25)*3A)(//|(?:%(?:25)*2F){2})\S*(@|%(?:25)*40)", re.IGNORECASE)
_PAIR_IN_TEXT = re.compile(rf"((?:{_SECRET})[\w.-]*(?:=|%(?:25)*3D))[^&\s]*", re.IGNORECASE)
# What is between a scheme, if there is one, and the last @: a password may hold anything, stray / ? # @ & too.
_USERINFO = re.compile(r"\A([^:@]*:/*)?.*@", re.DOTALL)
_SECRET_PAIR = re.compile(rf"(?:(?:{_SECRET})[\w.-]*|{_SECRET_END})\s*=", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether a value under this name must never be shown."""
    return bool(_SECRET_NAME.search(name))


def redact(text: str) -> str:
    """A message with the secrets of any URL in it replaced by ``***``, for URLs without white space.

    A second net, for the words of others. A value by itself is for :func:`redact_value`, which hides more.
    """
    return _USERINFO_IN_TEXT.sub(r"\1\2***\3", _PAIR_IN_TEXT.sub(r"\1***", text))


def redact_value(text: str) -> str:
    """``text`` with what may be secret in a URL in it, however often that is percent-encoded, replaced by ``***``.

    Where a secret ends cannot be seen in text that has been decoded: user and password are hidden up to the last @,
    and all that follows the name of a secret.
    """
    plain = text
    while (decoded := unquote(plain)) != plain:
        plain = decoded
    shown = plain
    if pair := _SECRET_PAIR.search(plain):
        shown = plain[: pair.end()] + ("***@" if "@" in plain[pair.end() :] else "***")
    shown = _USERINFO.sub(r"\1***@", shown)
    return text if shown == plain else shown


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" for a near miss, else nothing."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6) or [k for k in names if name and k.startswith(name)]
    return f"; did you mean {near[0]!r}?" if near else ""


def validate(model: type[M], values: Mapping[str, object], where: Callable[[str], str]) -> M:
    """``model`` built from ``values``; unknown names are refused whatever the model's own setting.

    ``where``: says for a field name which place its value came from. Raises :class:`~kvpool.errors.ConfigError` with
    every problem: the field, the value, what is allowed.
    """
    known = list(model.model_fields)
    problems = [
        f"{where(name)}: unknown option {name}={_shown(name, value)}{did_you_mean(name, known)} "
        + (f"(allowed: {', '.join(known)})" if known else "(it takes no options)")
        for name, value in values.items()
        if name not in known
    ]
    try:
        result = model.model_validate({name: value for name, value in values.items() if name in known})
    except ValidationError as error:
        first = {e["loc"][:1]: e["msg"] for e in reversed(error.errors())}  # a union has one error a member
        problems += [_problem(model, values, where, str(*loc), message) for loc, message in reversed(first.items())]
    else:
        if not problems:
            return result
    raise ConfigError("\n".join(problems)) from None  # the cause would show secret input values


def _problem(
    model: type[BaseModel], values: Mapping[str, object], where: Callable[[str], str], name: str, message: str
) -> str:
    message = message.removeprefix("Value error, ").removeprefix("Input ")
    if not name:  # a rule over several fields names them itself
        return f"{where(name)}: {message}"
    field = model.model_fields.get(name)
    allowed = f" (allowed: {field.description})" if field is not None and field.description else ""
    if name not in values:
        return f"{where(name)}: option {name} is missing{allowed}"
    return f"{where(name)}: {name}={_shown(name, values[name])}: {message}{allowed}"


def _shown(name: str, value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_shown(str(key), inner)}" for key, inner in value.items()) + "}"
    if is_secret(name):
        return "***"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_shown(name, inner) for inner in value) + "]"
    return repr(redact_value(value)) if isinstance(value, str) else redact_value(repr(value))
