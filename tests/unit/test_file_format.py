"""Where a key's file lies and what is in it: pure functions."""

from __future__ import annotations

import posixpath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.backends import _file_format as form

visible = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=512)
awkward = st.lists(st.sampled_from(["a", "..", ".", "/", "//", "=", "=00", "%", "%2E", "q" * 250, "~"]), min_size=1)
keys = visible | awkward.map(lambda parts: "".join(parts)[:512])


def path_of(key: str) -> str:
    place = form.place_of(key)
    return f"{place.parent}/{place.fan}/{place.name}" if place.parent else f"{place.fan}/{place.name}"


@given(key=keys)
def test_a_key_stays_below_the_root(key: str) -> None:
    path = path_of(key)
    parts = path.split("/")
    assert posixpath.normpath(path) == path
    assert not path.startswith(("/", ".."))
    assert all(0 < len(part) <= 255 and not part.startswith(".") for part in parts)
    assert len(path) < 3000
    place = form.place_of(key)
    directory = f"{place.parent}/{place.fan}" if place.parent else place.fan
    assert form.key_of(directory, place.name) == key


@given(one=keys, other=keys)
def test_no_file_stands_where_another_key_needs_a_directory(one: str, other: str) -> None:
    if one != other:
        assert path_of(one) != path_of(other)
        assert not path_of(one).startswith(path_of(other) + "/")


@pytest.mark.parametrize("key", ["", " ", "a b", "a\n", "\0", "ä", "a" * 513, "\x7f", "\udc80"])
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="is no key"):
        form.place_of(key)


def test_the_usual_key() -> None:
    key = "0f" * 16 + "/0.1/" + "ab" * 32
    assert path_of(key) == f"{'0f' * 16}/0.1/{form.place_of(key).fan}/{'ab' * 32}"


@pytest.mark.parametrize(("directory", "name"), [("", "x"), ("a", "x"), ("=tmp", "x"), ("a/=0", "x"), ("=000", "x")])
def test_other_files_have_no_key(directory: str, name: str) -> None:
    assert form.key_of(directory, name) is None


@pytest.mark.parametrize("pieces", [[], [b"one"], [b"many", b"p" * 1000, b"ieces"]])
def test_every_single_change_is_damage(pieces: list[bytes]) -> None:
    views = [memoryview(p) for p in pieces]
    whole = form.header("key", views) + b"".join(pieces)

    def damage(data: bytes, key: str = "key") -> str:
        head = bytearray(form.HEADER_BYTES)
        head[: len(data)] = data[: form.HEADER_BYTES]
        return form.damage(key, head, len(data), [memoryview(data[form.HEADER_BYTES :])])

    assert damage(whole) == ""
    assert "another key" in damage(whole, "kez")
    assert "cut off" in damage(whole[:10])
    assert damage(whole + b"\0")
    for i in range(len(whole)):
        assert damage(whole[:i])
        changed = bytearray(whole)
        changed[i] ^= 1 << (i % 8)
        assert damage(bytes(changed))
    assert damage(bytes(len(whole))), "zeros, as after a power loss"


@pytest.mark.parametrize("pieces", [[], [b"one"], [b"many", b"p" * 1000, b"ieces"]])
def test_without_a_checksum_only_bytes_of_the_payload_go_unproven(pieces: list[bytes]) -> None:
    views = [memoryview(p) for p in pieces]
    head = form.header("key", views, "none")
    size = sum(map(len, pieces))
    assert form.payload_bytes(head) == size
    assert form.damage("key", head, form.HEADER_BYTES + size, views) == ""
    assert form.damage("key", head, form.HEADER_BYTES + size, [memoryview(bytes(size))]) == "", "as promised"
    assert form.damage("kez", head, form.HEADER_BYTES + size, views)
    assert form.damage("key", head, form.HEADER_BYTES + size + 1, views)
    for i in range(len(head)):
        changed = bytearray(head)
        changed[i] ^= 1
        assert form.damage("key", changed, form.HEADER_BYTES + size, views)


@given(st.lists(st.text(max_size=6) | st.sampled_from(["q" * 512, "q" * 513, "\ud800", "a b", "\n", "~", "!", "\x7f"])))
def test_many_keys_are_judged_as_one_by_one(keys: list[str]) -> None:
    def is_key(key: str) -> bool:
        try:
            form.check_key(key)
        except form.BadKey:
            return False
        return True

    assert form.are_keys(keys) == all(map(is_key, keys))
