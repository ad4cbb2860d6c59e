"""The names in ``kvpool`` itself: all there, and none loaded before it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvpool


def test_every_public_name_is_there() -> None:
    assert set(kvpool._HOMES) | {"__version__"} == set(kvpool.__all__)
    for name, home in kvpool._HOMES.items():
        assert getattr(kvpool, name) is getattr(sys.modules[home], name)
    assert set(kvpool.__all__) <= set(dir(kvpool))


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'KVPol'"):
        getattr(kvpool, "KVPol")  # noqa: B009 - a type checker would find it


def test_the_import_is_light() -> None:
    code = "import sys, kvpool; sys.exit(' '.join({'numpy', 'anyio', 'pydantic', 'asyncio'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr.strip() == ""
