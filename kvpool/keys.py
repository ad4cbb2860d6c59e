"""Keys that name what an object holds: namespace, group, shard, chunk hash.

``<namespace: 32 hex>/<group>.<shard>/<digest hex>``, for example ``0f3a.../0.0/91c2...``. Whatever decides the bytes of
an object and is not in its chunk hash is a fact of the namespace.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import add
from typing import Self, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from kvpool.errors import ConfigError, HashError
from kvpool.hashes import BlockHashes
from kvpool.spec import CacheSpec

__all__ = ["FORMAT_VERSION", "Fact", "KeySpace", "Namespace"]

#: Version of the key form and of the stored bytes; part of every namespace.
FORMAT_VERSION = 1

#: Characters; what every store takes (see :mod:`kvpool.store`).
_MAX_KEY = 512

Fact: TypeAlias = "bool | int | float | str | list[Fact] | tuple[Fact, ...] | Mapping[str, Fact] | None"


@dataclass(frozen=True)
class Namespace:
    """What the bytes under a set of keys are: a digest of every fact that decides them.

    ``digest``: 16 bytes, BLAKE2b of the manifest. Made by :meth:`of`; equal facts in any order give equal digests.
    """

    digest: bytes
    manifest: str = field(repr=False, compare=False)  #: the facts as canonical JSON, for a person to read

    @classmethod
    def of(cls, facts: Mapping[str, Fact]) -> Self:
        """The namespace of these facts. Raises ConfigError, naming the fact, for what JSON cannot hold exactly."""
        told = {"kvpool": FORMAT_VERSION, "facts": _plain(facts, "facts")}
        manifest = json.dumps(told, sort_keys=True, separators=(",", ":"))
        return cls(hashlib.blake2b(manifest.encode(), digest_size=16).digest(), manifest)

    @property
    def hex(self) -> str:
        """The digest as 32 hex digits; the first part of every key."""
        return self.digest.hex()

    @property
    def facts(self) -> dict[str, Fact]:
        """The facts, as read back from the manifest."""
        facts: dict[str, Fact] = json.loads(self.manifest)["facts"]
        return facts

    def derive(self, **facts: Fact) -> Self:
        """A namespace with these facts added or replaced (tenant, epoch, adapter fingerprint)."""
        return self.of({**self.facts, **facts})


def _plain(value: object, where: str) -> Fact:
    """``value`` in the types of JSON, or a ConfigError that says which part has no exact form in it."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"namespace: {where} has the key {key!r}; keys must be str")
        return {key: _plain(inner, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, f"{where}[{i}]") for i, inner in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"namespace: {where} = {value!r} has no exact JSON form; use a string")
    if value is None or type(value) in (bool, int, float, str):
        return cast("Fact", value)
    raise ConfigError(f"namespace: {where} is a {type(value).__name__}; facts are None, bool, int, float, str")


class KeySpace:
    """Builds the keys of one namespace, many at a time."""

    def __init__(self, namespace: Namespace, spec: CacheSpec) -> None:
        self.namespace = namespace
        self.spec = spec
        self._prefixes = [[f"{namespace.hex}/{g}.{s}/" for s in range(x.shards)] for g, x in enumerate(spec.groups)]
        self._longest = max(len(prefix) for prefixes in self._prefixes for prefix in prefixes)

    @cached_property
    def manifest_key(self) -> str:
        """Under this key the namespace's manifest is stored; its length is in it, so that a reader knows it."""
        return f"{self.namespace.hex}/manifest/{len(self.namespace.manifest.encode())}"

    def prefix(self, group: int, shard: int) -> str:
        """What the keys of one group and shard begin with. Raises ConfigError if the spec has no such shard."""
        if not 0 <= group < len(self._prefixes) or not 0 <= shard < len(self._prefixes[group]):
            raise ConfigError(f"no group {group} with shard {shard} in {self.spec}")
        return self._prefixes[group][shard]

    def keys(self, group: int, shard: int, hashes: BlockHashes, hash_ids: npt.NDArray[np.intp]) -> list[str]:
        """One key for each hash index in ``hash_ids`` (intp[n]); only these digests are read.

        Raises IndexError for an index that is no hash, and HashError for digests so long that no store takes the key.
        """
        prefix = self.prefix(group, shard)
        if not len(hash_ids):
            return []
        return [prefix + digest for digest in self._lines(hashes.pack(hash_ids), hashes.hash_len)]

    def all_shards(self, hashes: BlockHashes, wanted: Sequence[tuple[int, npt.NDArray[np.intp]]]) -> list[str]:
        """The keys of every shard of each (group, hash indices >= 0), group by group, shard by shard; see :meth:`keys`.

        All digests are read and written out at once: for five groups of a few keys each half the time of five calls.
        """
        ids = np.concatenate([ids for _, ids in wanted]) if len(wanted) > 1 else wanted[0][1]
        digests = self._lines(hashes.gather(ids), hashes.hash_len) if len(ids) else []
        keys: list[str] = []
        start = 0
        for group, ids in wanted:
            end = start + len(ids)
            part = digests[start:end]
            for prefix in self._prefixes[group]:
                keys += [prefix + digest for digest in part]
            start = end
        return keys

    def prefixed(
        self, prefixes: Sequence[str], hashes: BlockHashes, hash_ids: npt.NDArray[np.intp], start: int
    ) -> list[str]:
        """The keys of hash indices of several groups, each with its :meth:`prefix`.

        ``hash_ids``: intp[n], counted from hash ``start`` on, none of them below 0. Raises as :meth:`keys`.
        """
        return list(map(add, prefixes, self._lines(hashes.gather(hash_ids, start), hashes.hash_len)))

    def _lines(self, digests: bytes, hash_len: int) -> list[str]:
        """Digests as hex: one C call for all, and one to cut them apart. ``bytes.hex()`` a digest takes 1.7 times."""
        if self._longest + 2 * hash_len > _MAX_KEY:
            raise HashError(
                f"digests of {hash_len} bytes make keys of {self._longest + 2 * hash_len} characters, "
                f"more than {_MAX_KEY}"
            )
        return digests.hex("\n", hash_len).split("\n")
