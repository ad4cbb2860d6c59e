"""Namespaces and keys: what an object holds decides what it is called."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.errors import ConfigError, HashError
from kvpool.hashes import BlockHashes
from kvpool.keys import FORMAT_VERSION, KeySpace, Namespace
from kvpool.spec import CacheGroup, CacheSpec, Kind

SPEC = CacheSpec((CacheGroup(Kind.FULL, 16, shards=2), CacheGroup(Kind.FULL, 32)), 16)
FACTS: dict[str, Any] = {
    "model": {"hidden_size": 128, "layers": 2, "rope": [1e4, None]},
    "dtype": "float16",
    "tp": 2,
    "salt": "",
}


class TestNamespace:
    def test_equal_facts_in_any_order_are_one_namespace(self) -> None:
        backwards = json.loads(json.dumps(dict(reversed(FACTS.items()))))
        assert Namespace.of(FACTS) == Namespace.of(backwards)
        assert hash(Namespace.of(FACTS)) == hash(Namespace.of(backwards))
        assert len(Namespace.of(FACTS).digest) == 16
        assert Namespace.of(FACTS).hex == Namespace.of(FACTS).digest.hex()

    @pytest.mark.parametrize(
        "change",
        [{"dtype": "float32"}, {"tp": 1}, {"tp": 2.0}, {"tp": "2"}, {"salt": "a"}, {"salt": None}, {"more": False}],
    )
    def test_every_fact_counts(self, change: dict[str, Any]) -> None:
        assert Namespace.of({**FACTS, **change}).digest != Namespace.of(FACTS).digest

    def test_the_manifest_tells_a_person(self) -> None:
        told = json.loads(Namespace.of(FACTS).manifest)
        assert told == {"kvpool": FORMAT_VERSION, "facts": FACTS}
        assert Namespace.of(FACTS).facts == FACTS

    def test_derive_adds_or_replaces(self) -> None:
        base = Namespace.of(FACTS)
        tenant = base.derive(tenant="a")
        assert tenant == Namespace.of({**FACTS, "tenant": "a"})
        assert tenant.derive(tenant="b") == base.derive(tenant="b")
        assert len({base.digest, tenant.digest, base.derive(tenant="b").digest}) == 3
        assert base == Namespace.of(FACTS), "the base is untouched"

    @pytest.mark.parametrize(
        ("facts", "where"),
        [
            ({"a": {"b": [1, b"x"]}}, r"facts\.a\.b\[1\]"),
            ({"a": {1: 2}}, "facts.a has the key 1"),
            ({"a": float("nan")}, "facts.a = nan"),
            ({"a": float("inf")}, "facts.a = inf"),
            ({"a": {1, 2}}, "facts.a is a set"),
            ({"a": np.float32(1)}, "facts.a is a float32"),
        ],
    )
    def test_facts_that_json_cannot_hold_exactly_are_refused_by_name(self, facts: Any, where: str) -> None:
        with pytest.raises(ConfigError, match=where):
            Namespace.of(facts)


class TestKeySpace:
    def test_form(self) -> None:
        space = KeySpace(Namespace.of(FACTS), SPEC)
        hashes = BlockHashes(b"\x01\x02\x03\x04", 2, scheme="x")
        digest = Namespace.of(FACTS).hex
        assert space.keys(0, 1, hashes, np.array([1, 0])) == [f"{digest}/0.1/0304", f"{digest}/0.1/0102"]
        assert space.manifest_key == f"{digest}/manifest/{len(space.namespace.manifest)}"
        assert space.keys(0, 0, hashes, np.array([], np.intp)) == []
        assert KeySpace(Namespace.of({}), SPEC).keys(0, 0, BlockHashes(scheme="x"), np.array([], np.intp)) == []

    @settings(deadline=None)
    @given(st.integers(1, 64), st.data())
    def test_equals_one_key_at_a_time(self, hash_len: int, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, 40))
        hashes = BlockHashes(os.urandom(count * hash_len), hash_len, scheme="x")
        ids = data.draw(st.lists(st.integers(0, count - 1), max_size=60))
        space = KeySpace(Namespace.of(FACTS), SPEC)
        expected = [f"{space.namespace.hex}/1.0/{hashes[i].hex()}" for i in ids]
        keys = space.keys(1, 0, hashes, np.array(ids, np.intp))
        assert keys == expected
        assert all(len(key) <= 200 and key.isascii() and not any(c.isspace() for c in key) for key in keys)

    def test_group_and_shard_keep_keys_apart(self) -> None:
        space, hashes = KeySpace(Namespace.of(FACTS), SPEC), BlockHashes(b"aabb", 2, scheme="x")
        ids = np.arange(2)
        keys = [space.keys(g, s, hashes, ids) for g, s in ((0, 0), (0, 1), (1, 0))]
        assert len({key for part in keys for key in part}) == 6

    @pytest.mark.parametrize(("group", "shard"), [(0, 2), (1, 1), (2, 0), (-1, 0), (0, -1)])
    def test_what_the_spec_does_not_have_is_refused(self, group: int, shard: int) -> None:
        with pytest.raises(ConfigError, match="no group"):
            KeySpace(Namespace.of(FACTS), SPEC).prefix(group, shard)

    def test_a_salt_changes_every_key(self) -> None:
        hashes, ids = BlockHashes(os.urandom(64 * 32), 32, scheme="x"), np.arange(64)
        spaces = [KeySpace(Namespace.of(FACTS).derive(tenant=t), SPEC) for t in ("a", "b")]
        first, second = (set(space.keys(0, 0, hashes, ids)) for space in spaces)
        assert not first & second

    def test_an_index_below_0_names_nothing(self) -> None:
        hashes = BlockHashes(b"aabb", 2, scheme="x")
        with pytest.raises(IndexError, match="hash -1 of 2"):
            KeySpace(Namespace.of(FACTS), SPEC).keys(0, 0, hashes, np.array([0, -1]))

    def test_keys_longer_than_any_store_takes_are_refused(self) -> None:
        space = KeySpace(Namespace.of(FACTS), SPEC)
        longest = (512 - len(space.prefix(0, 0))) // 2
        (key,) = space.keys(0, 0, BlockHashes(bytes(longest), longest, scheme="x"), np.array([0]))
        assert 510 < len(key) <= 512
        with pytest.raises(HashError, match="more than 512"):
            space.keys(0, 0, BlockHashes(bytes(longest + 1), longest + 1, scheme="x"), np.array([0]))
