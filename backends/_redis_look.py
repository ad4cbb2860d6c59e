"""What a Redis server says about itself, and what that means for a cache."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.backends._redis_servers import Pool
from kvpool.backends._redis_wire import Reply, ServerError, command
from kvpool.store import Finding

__all__ = ["look"]

_TESTED = (6, 2)  # older servers are not


async def look(pool: Pool, ttl: bool) -> list[Finding]:
    """``ttl``: whether values are given one. Raises ConnectionLost or ServerError if the server cannot be used."""
    async with pool.connection() as connection:
        replies = await connection.ask(command("INFO", "server"), command("INFO", "memory"))
    for reply in replies:
        if isinstance(reply, ServerError) and reply.code != "NOPERM":
            raise reply
    facts = _facts(replies)
    version, port = facts.get("redis_version", ""), facts.get("tcp_port", "")
    findings = [Finding("ok", f"Redis {version} on port {port}")] if version else []
    if version and tuple(map(int, version.split(".")[:2])) < _TESTED:
        findings.append(Finding("warn", f"Redis {version} is older than what is tested", "take 6.2 or newer"))
    if not facts:
        text = "this user may not see the server's settings"
        findings.append(Finding("ok", text, "+info lets the doctor look at them"))
    return [*findings, *_memory(facts, ttl)]


def _facts(replies: Sequence[Reply]) -> dict[str, str]:
    lines = [line for reply in replies if isinstance(reply, bytes) for line in reply.decode(errors="replace").split()]
    return {name: value for name, _, value in (line.partition(":") for line in lines)}


def _memory(facts: dict[str, str], ttl: bool) -> list[Finding]:
    """What the memory settings mean for a cache."""
    policy, limit = facts.get("maxmemory_policy", ""), facts.get("maxmemory", "")
    if limit == "0":
        text = "the server has no maxmemory, so it may take all memory of its machine"
        return [Finding("warn", text, "set one, and a maxmemory-policy")]
    if policy == "noeviction" or (policy.startswith("volatile") and not ttl):
        text = f"maxmemory-policy {policy}: a full server takes no more values"
        return [Finding("warn", text, "allkeys-lru keeps the latest")]
    if not policy:
        return []
    used, most = facts.get("used_memory_human", "?"), facts.get("maxmemory_human", "?")
    return [Finding("ok", f"{used} of {most} of memory are in use; when it is full, {policy} evicts")]
