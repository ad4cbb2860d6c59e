"""What Mooncake's error codes mean to kvpool. Names and numbers are those of its ``types.h`` (0.3.9 to 0.3.14)."""

from __future__ import annotations

from enum import Enum

__all__ = ["CLIENT_FAILED", "TRANSFER_FAIL", "Meaning", "described", "meaning_of"]


class Meaning(Enum):
    """What to do about a code."""

    OK = "done"
    ABSENT = "nothing whole is stored under the key"
    RETRY = "somebody else holds the object for a moment"
    PRESSURE = "there is no room: pause puts"
    MISFIT = "the transfer failed, or the stored length is another one: ask for the length"
    UNREACHABLE = "the master does not answer: it counts against the whole store"
    FAILED = "the call cannot be done"


_CODES: dict[int, tuple[str, Meaning]] = {
    -1: ("INTERNAL_ERROR", Meaning.FAILED),
    -10: ("BUFFER_OVERFLOW", Meaning.FAILED),
    -100: ("SHARD_INDEX_OUT_OF_RANGE", Meaning.FAILED),
    -101: ("SEGMENT_NOT_FOUND", Meaning.FAILED),
    -102: ("SEGMENT_ALREADY_EXISTS", Meaning.FAILED),
    -103: ("CLIENT_NOT_FOUND", Meaning.FAILED),
    -200: ("NO_AVAILABLE_HANDLE", Meaning.PRESSURE),
    -300: ("INVALID_VERSION", Meaning.FAILED),
    -400: ("INVALID_KEY", Meaning.FAILED),
    -500: ("WRITE_FAIL", Meaning.FAILED),
    -600: ("INVALID_PARAMS", Meaning.MISFIT),
    -601: ("ILLEGAL_CLIENT", Meaning.FAILED),
    -700: ("INVALID_WRITE", Meaning.FAILED),
    -701: ("INVALID_READ", Meaning.FAILED),
    -702: ("INVALID_REPLICA", Meaning.ABSENT),
    -703: ("REPLICA_IS_NOT_READY", Meaning.ABSENT),
    -704: ("OBJECT_NOT_FOUND", Meaning.ABSENT),
    -705: ("OBJECT_ALREADY_EXISTS", Meaning.OK),
    -706: ("OBJECT_HAS_LEASE", Meaning.RETRY),
    -707: ("LEASE_EXPIRED", Meaning.RETRY),
    -708: ("OBJECT_HAS_REPLICATION_TASK", Meaning.RETRY),
    -709: ("OBJECT_NO_REPLICATION_TASK", Meaning.RETRY),
    -710: ("REPLICA_NOT_FOUND", Meaning.ABSENT),
    -711: ("REPLICA_ALREADY_EXISTS", Meaning.FAILED),
    -712: ("REPLICA_IS_GONE", Meaning.ABSENT),
    -713: ("REPLICA_NOT_IN_LOCAL_MEMORY", Meaning.FAILED),
    -714: ("OBJECT_REPLICA_BUSY", Meaning.RETRY),
    -800: ("TRANSFER_FAIL", Meaning.MISFIT),
    -801: ("CHECKSUM_MISMATCH", Meaning.ABSENT),
    -900: ("RPC_FAIL", Meaning.UNREACHABLE),
    -901: ("RPC_TIMEOUT", Meaning.UNREACHABLE),
    -1010: ("UNAVAILABLE_IN_CURRENT_STATUS", Meaning.RETRY),
    -1011: ("UNAVAILABLE_IN_CURRENT_MODE", Meaning.FAILED),
    -1012: ("NOT_SUPPORTED", Meaning.FAILED),
    -1401: ("TASK_PENDING_LIMIT_EXCEEDED", Meaning.RETRY),
    -1700: ("TENANT_QUOTA_EXCEEDED", Meaning.PRESSURE),
    -1701: ("TENANT_NOT_REGISTERED", Meaning.FAILED),
}
#: What stands for an answer that is none: too short, or of another type.
CLIENT_FAILED = -1
TRANSFER_FAIL = -800


def meaning_of(code: int) -> Meaning:
    """What a return value means; lengths, 0 and anything positive are OK."""
    return Meaning.OK if code >= 0 else _CODES.get(code, ("", Meaning.FAILED))[1]


def described(code: int) -> str:
    """A code with Mooncake's name for it."""
    name = _CODES.get(code, ("unknown to kvpool", None))[0]
    return f"{name} ({code})"
