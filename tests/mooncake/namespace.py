"""A network of its own for whatever runs Mooncake: its client listens on all interfaces, whatever it is told.

``python -m tests.mooncake.namespace COMMAND...`` runs a command in a new network namespace that has only a loopback
interface: a benchmark, ``python -m pytest tests/mooncake -s --pdb``, or a shell to try things in. All that the command
starts lives in there too, and two such commands do not see each other's ports.

It takes root, or a kernel that lets users make namespaces. Where neither is so the command runs on this machine's own
network, and standard error says so.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys

__all__ = ["INSIDE", "enter"]

#: The environment variable that says that this process and its children are where they should be.
INSIDE = "TESTS_MOONCAKE_NAMESPACE"

_CLONE_NEWUSER, _CLONE_NEWNET = 0x1000_0000, 0x4000_0000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_libc = ctypes.CDLL(None, use_errno=True)


def enter() -> bool:
    """Move this process, which has one thread as yet, to a new network; False if that is not allowed."""
    if not (_unshare(_CLONE_NEWNET) or _enter_as_user()):
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        name, flags = struct.unpack("16sH22x", fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("16s24x", b"lo")))
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH22x", name, flags | _IFF_UP))
    return True


def _enter_as_user() -> bool:
    uid, gid = os.getuid(), os.getgid()
    if not _unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
        return False
    for file, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{file}", "w") as out:
            out.write(text)
    return True


def _unshare(what: int) -> bool:
    return not _libc.unshare(what)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(f"usage: {sys.executable} -m tests.mooncake.namespace COMMAND...")
    if not enter():
        print(
            "Mooncake runs on this machine's network and listens on all its interfaces: this process may not make a "
            "network namespace (root may)",
            file=sys.stderr,
        )
    os.environ[INSIDE] = "1"
    os.execvp(sys.argv[1], sys.argv[1:])
