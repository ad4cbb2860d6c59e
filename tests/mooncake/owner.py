"""A process that lends memory to a master until its input ends: ``python -m tests.mooncake.owner ADDRESS BYTES``.

It answers calls of a raw client's methods on the way: frames of (method, arguments) come in, frames of results go out.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

from tests.mooncake.servers import read, write

# Before Mooncake is imported: what an owner on one machine needs.
os.environ |= {
    "MC_TCP_BIND_ADDRESS": "127.0.0.1",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_RPC_TIMEOUT_MS": "5000",
    "MC_LOG_LEVEL": "ERROR",
}


def main(address: str, memory: int) -> None:
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what Mooncake prints is no answer
    client = import_module("mooncake.store").MooncakeDistributedStore()
    code = client.setup("127.0.0.1", "P2PHANDSHAKE", memory, 64 << 20, "tcp", "", address)
    write(answers, "ready" if code == 0 else f"setup answers {code}")
    while code == 0 and (request := read(requests)) is not None:
        method, arguments = request[0]
        write(answers, getattr(client, method)(*arguments))
    client.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
