"""A cluster and a master with replica and Sentinel, of real servers, and ways to disturb them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tests.redis.server import RedisServer

SLOTS = 16384


def wait_until(true: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    give_up = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < give_up, f"waited in vain until {what}"
        time.sleep(0.01)


class RedisCluster:
    """Three masters that share the slots, and replicas that are empty until they are asked to follow one."""

    def __init__(self, stack: ExitStack) -> None:
        options: dict[str, str | int] = {
            "cluster_enabled": "yes",
            "cluster_node_timeout": 5000,
            "repl_diskless_sync_delay": 0,
        }
        self.nodes = [stack.enter_context(RedisServer(**options)) for _ in range(3)]
        self.stack = stack
        bounds = [SLOTS * n // 3 for n in range(4)]
        for n, node in enumerate(self.nodes):
            node.raw("CLUSTER", "SET-CONFIG-EPOCH", n + 1)
            node.raw("CLUSTER", "ADDSLOTS", *range(bounds[n], bounds[n + 1]))
            self.meet(node)
        self.wait()

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def meet(self, node: RedisServer) -> None:
        first = self.nodes[0]
        if node is not first:
            node.raw("CLUSTER", "MEET", "127.0.0.1", first.port, first.port + 10_000)

    def wait(self) -> None:
        wait_until(
            lambda: all(
                b"cluster_state:ok" in node.raw("CLUSTER", "INFO")
                and f"cluster_known_nodes:{len(self.nodes)}".encode() in node.raw("CLUSTER", "INFO")
                for node in self.nodes
            ),
            "the cluster is formed",
        )

    def owner(self, name: str) -> RedisServer:
        """The node that has a name, as the cluster itself sees it."""
        slot = self.nodes[0].raw("CLUSTER", "KEYSLOT", name)
        for first, last, (_, port, *_), *_ in self.nodes[0].raw("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == port)
        raise AssertionError(f"nobody has slot {slot}")

    def everywhere(self, *words: str | bytes | int) -> list[Any]:
        return [node.raw(*words) for node in self.nodes]


@contextmanager
def redis_cluster() -> Iterator[RedisCluster]:
    with ExitStack() as stack:
        yield RedisCluster(stack)


def move_slot(cluster: RedisCluster, slot: int, source: RedisServer, target: RedisServer) -> None:
    """Give a slot with its keys to another node, as a rebalancing does."""
    begin_move(slot, source, target)
    finish_move(cluster, slot, source, target)


def begin_move(slot: int, source: RedisServer, target: RedisServer) -> None:
    target.raw("CLUSTER", "SETSLOT", slot, "IMPORTING", source.raw("CLUSTER", "MYID"))
    source.raw("CLUSTER", "SETSLOT", slot, "MIGRATING", target.raw("CLUSTER", "MYID"))


def finish_move(cluster: RedisCluster, slot: int, source: RedisServer, target: RedisServer) -> None:
    if names := source.raw("CLUSTER", "GETKEYSINSLOT", slot, 10_000):
        source.raw("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *names)
    for node in (target, source, *cluster.nodes):
        node.raw("CLUSTER", "SETSLOT", slot, "NODE", target.raw("CLUSTER", "MYID"))
    # With the highest epoch of all, known to all, no message that is still on its way gives the slot back.
    target.raw("CLUSTER", "BUMPEPOCH")
    epoch = _info(target)["cluster_my_epoch"]
    wait_until(
        lambda: all(_info(node)["cluster_current_epoch"] == epoch for node in cluster.nodes), "the new owner is known"
    )


def _info(node: RedisServer) -> dict[str, str]:
    return dict(line.split(":") for line in node.raw("CLUSTER", "INFO").decode().split())


class Watched:
    """A master with a replica, watched by one Sentinel that may decide alone."""

    def __init__(self, stack: ExitStack) -> None:
        self.master = stack.enter_context(RedisServer(repl_diskless_sync_delay=0))
        follow = f"127.0.0.1 {self.master.port}"
        self.replica = stack.enter_context(RedisServer(repl_diskless_sync_delay=0, replicaof=follow))
        self.sentinel = stack.enter_context(Sentinel(self.master.port))
        wait_until(lambda: b"master_link_status:up" in self.replica.raw("INFO", "replication"), "the replica follows")
        wait_until(self._sentinel_knows_the_replica, "the Sentinel knows the replica")

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:1,127.0.0.1:{self.sentinel.port}/main"

    def _sentinel_knows_the_replica(self) -> bool:
        facts = [dict(zip(r[::2], r[1::2], strict=True)) for r in self.sentinel.raw("SENTINEL", "REPLICAS", "main")]
        return [f[b"master-link-status"] for f in facts] == [b"ok"]

    def wait_for_replica(self) -> None:
        """Until the replica has everything."""
        self.master.raw("SET", "last", "")
        assert self.master.raw("WAIT", 1, 30_000) == 1

    def wait_for_failover(self) -> None:
        """Until the Sentinel names the other server, and that one is a master; then the two have changed places."""
        port = str(self.replica.port).encode()
        ask = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main")
        wait_until(lambda: self.sentinel.raw(*ask)[1] == port, "the Sentinel names the other server")
        wait_until(lambda: self.replica.raw("ROLE")[0] == b"master", "the other server is a master")
        self.master, self.replica = self.replica, self.master


class Sentinel(RedisServer):
    """Its configuration must be a file, for it writes there."""

    def __init__(self, master_port: int) -> None:
        super().__init__()
        del self.options["save"]
        self.config = self.folder / "sentinel.conf"
        self.config.write_text(
            f"sentinel monitor main 127.0.0.1 {master_port} 1\n"
            "sentinel down-after-milliseconds main 300\nsentinel failover-timeout main 3000\n"
        )
        self.arguments = [str(self.config), "--sentinel"]


@contextmanager
def watched() -> Iterator[Watched]:
    with ExitStack() as stack:
        yield Watched(stack)
