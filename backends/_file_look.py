"""What can be said about a directory before it is full, slow or gone. Blocking; runs in a worker thread."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from kvpool.store import Finding

__all__ = ["look"]

_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
_FAR = re.compile(r"nfs|cifs|smb|9p|ceph|gluster|lustre|gpfs|beegfs|afs|fuse\.(?!fuse-overlayfs)")
_FEW = 0.05  # of the space, or of the files that the file system can take
_OTHERS_WRITE = 0o022


def look(root: str, capacity: int | None) -> Iterator[Finding]:
    """About the directory ``root``. Raises OSError if it cannot be looked at."""
    kind = file_system(root)
    space = os.statvfs(root)
    total, free = space.f_frsize * space.f_blocks, space.f_frsize * space.f_bavail
    yield Finding("ok", f"{kind}, {_size(free)} free of {_size(total)}")
    if kind in _IN_MEMORY:
        yield Finding("warn", f"{kind} is memory, empty after a restart of the machine", "name a directory on a disk")
    if _FAR.match(kind):
        text = f"{kind} may hang when the network does, and a thread in it cannot be interrupted"
        yield Finding("warn", text, "put guarded:// in front, see docs/wrappers.md")
    if capacity is None:
        text = "without a capacity values are kept until the disk is full"
        yield Finding("warn", text, "add one, such as ?capacity=100GiB")
    elif capacity > total:
        text = f"the capacity of {_size(capacity)} is more than the file system has"
        yield Finding("warn", text, f"set one below {_size(total)}")
    if free < total * _FEW:
        yield Finding("warn", f"only {free / total:.1%} of the space is free", "make room, or set a lower capacity")
    if space.f_files and space.f_favail < space.f_files * _FEW:
        yield Finding("warn", f"the file system can take only {space.f_favail:,} more files", "take larger blocks")
    if os.stat(root).st_mode & _OTHERS_WRITE:
        text = "others may write here, and a checksum does not tell whose value it is"
        yield Finding("warn", text, f"chmod go-w {root}")


def file_system(root: str) -> str:
    """The kind of file system that a path lies on, as the kernel names it."""
    path = os.path.realpath(root)
    best, kind = "", "unknown file system"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
        for line in mounts:
            mount, _, rest = line.partition(" - ")
            place = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), mount.split()[4])
            if (path + "/").startswith(place.rstrip("/") + "/") and len(place) >= len(best):
                best, kind = place, rest.split()[0]
    return kind


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"
