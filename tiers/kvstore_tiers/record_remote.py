"""RemoteRecords: records in Redis or Valkey, where every replica reads and changes the same ones.

It has connections, threads and a circuit breaker of its own (see remote_node), so that blocks on their way
keep no record waiting. A server that answers nothing in time, or that is not the one to write to now, is an
outcome; it heals by itself.
"""

import asyncio
import logging
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from kvstore.log_limit import LimitedWarning
from kvstore.tenant import TenantId
from kvstore.tier import TierHealth
from kvstore_tiers.record_remote_session import (
    MAX_REMOVED,
    Answered,
    Exchange,
    discard_record,
    drop_record,
    read_heads,
    read_index,
    read_record,
    read_times,
    remove_records,
    store_record,
)
from kvstore_tiers.record_shared import (
    Result,
    SharedEnd,
    SharedEntries,
    SharedFound,
    SharedNames,
    SharedReplies,
    SharedStatus,
    StoreRequest,
)
from kvstore_tiers.remote_node import CONTROL_TIMEOUT_S, NodeSettings, RemoteNode, Work
from kvstore_tiers.remote_servers import servers_of, with_tls
from kvstore_tiers.remote_session import Tally
from kvstore_tiers.remote_tls import TlsFolder
from kvstore_tiers.remote_topology import Servers
from kvstore_tiers.remote_url import RemoteUrl
from kvstore_tiers.resp import RespConnection, command

_log = logging.getLogger(__name__)

RIGHTS = (
    "+get +set +del +exists +getrange +pttl +pexpire +time +watch +unwatch +multi +exec +hget +hset +hdel"
    " +hmget +hscan +hincrby +asking"
)
"""What a user of the server must be allowed for records."""

_INFO_BYTES = 256 << 10

R = TypeVar("R", bound=Result)
Question = Callable[[Exchange], None]


class RemoteRecords:
    """Records on the servers at ``url``, as in ``RemoteTier``. One event loop's thread."""

    def __init__(
        self,
        url: str,
        *,
        user: str = "",
        password: str = "",
        sentinel_master: str = "mymaster",
        key_prefix: str = "kvstore",
        timeout_s: float = 0.25,
        num_connections: int = 4,
        breaker_backoff_s: float = 0.25,
        breaker_backoff_max_s: float = 8.0,
        tls: TlsFolder | ssl.SSLContext | None = None,
        clock: Callable[[], float],
    ) -> None:
        self._url = RemoteUrl.parse(url, user=user, password=password)
        self._sentinel_master = sentinel_master
        self._tls = tls
        self._prefix = key_prefix
        self._clock = clock
        self._settings = NodeSettings(
            name="records",
            # A commit of the server's own may take longer than a look at a block should.
            timeout_s=max(timeout_s, CONTROL_TIMEOUT_S),
            num_connections=num_connections,
            backoff_s=breaker_backoff_s,
            backoff_max_s=breaker_backoff_max_s,
            clock=clock,
            count=self._count,
        )
        self._servers: Servers | None = None
        self._refusals = LimitedWarning(_log, interval_s=60.0, clock=clock)
        self._looked: set[RemoteNode] = set()
        self.counters: Counter[str] = Counter()

    def health(self) -> TierHealth:
        """Return whether any server is worth asking now."""
        if self._servers is None:
            return TierHealth(is_up=False, reason="not open")
        healths = [node.health() for node in self._servers.nodes]
        if not healths:
            return TierHealth(is_up=False, reason=self._servers.trouble)
        return next((health for health in healths if health.is_up), healths[0])

    async def open(self) -> None:
        """Begin to talk to the servers. Those that are absent are asked again.

        Raises:
            TierUnavailable: a TLS file cannot be used.
        """
        if self._servers is not None:
            return
        settings = await with_tls(self._settings, self._url, self._tls)
        servers = servers_of(self._url, settings, sentinel_master=self._sentinel_master)
        await servers.open()
        self._servers = servers
        meetings = [asyncio.create_task(node.met()) for node in servers.nodes]
        if meetings:
            await asyncio.wait(meetings, timeout=2 * settings.control_timeout_s)

    async def close(self) -> None:
        """Finish what is under way. Idempotent."""
        servers, self._servers = self._servers, None
        if servers is not None:
            await servers.close()

    async def read(self, tenant: TenantId, record_id: bytes, *, deadline_s: float) -> SharedFound:
        """Read a record, its time left, and its entry in the index."""
        names = SharedNames(self._prefix, tenant)
        found = SharedFound()
        question = partial(read_record, names=names, record_id=record_id, found=found)
        return await self._ask(names.index, question, found, deadline_s)

    async def store(self, tenant: TenantId, request: StoreRequest, *, deadline_s: float) -> SharedEnd:
        """Store a record if the present one is the expected one, and the tenant's quota allows it."""
        names, end = SharedNames(self._prefix, tenant), SharedEnd()
        question = partial(store_record, names=names, request=request, end=end)
        return await self._ask(names.index, question, end, deadline_s, is_write=True)

    async def drop(self, tenant: TenantId, record_id: bytes, *, deadline_s: float) -> SharedEnd:
        """Put a mark in a record's place; ``count`` says whether there was one."""
        names, end = SharedNames(self._prefix, tenant), SharedEnd()
        question = partial(drop_record, names=names, record_id=record_id, end=end)
        return await self._ask(names.index, question, end, deadline_s, is_write=True)

    async def discard(
        self, tenant: TenantId, record_id: bytes, seen: bytes, *, deadline_s: float
    ) -> SharedEnd:
        """Remove what cannot be read, if it is still what was seen."""
        names, end = SharedNames(self._prefix, tenant), SharedEnd()
        question = partial(discard_record, names=names, record_id=record_id, seen=seen, end=end)
        return await self._ask(names.index, question, end, deadline_s, is_write=True)

    async def entries(self, tenant: TenantId, *, deadline_s: float) -> SharedEntries:
        """Read the index of a tenant."""
        names, found = SharedNames(self._prefix, tenant), SharedEntries()
        return await self._ask(names.index, partial(read_index, names=names, found=found), found, deadline_s)

    async def heads(self, tenant: TenantId, ids: Sequence[bytes], *, deadline_s: float) -> SharedReplies:
        """Read the heads of records, as stored; empty where there is none."""
        names, found = SharedNames(self._prefix, tenant), SharedReplies()
        question = partial(read_heads, names=names, ids=ids, found=found)
        return await self._ask(names.index, question, found, deadline_s)

    async def times(self, tenant: TenantId, ids: Sequence[bytes], *, deadline_s: float) -> SharedReplies:
        """Read the milliseconds left of records; negative where there is none."""
        names, found = SharedNames(self._prefix, tenant), SharedReplies()
        question = partial(read_times, names=names, ids=ids, found=found)
        return await self._ask(names.index, question, found, deadline_s)

    async def remove(
        self,
        tenant: TenantId,
        wanted: Sequence[tuple[bytes, bytes]],
        *,
        only_absent: bool,
        deadline_s: float,
    ) -> int | None:
        """Remove records by digest and entry; returns how many, None if not all could be looked at."""
        names = SharedNames(self._prefix, tenant)
        count, is_whole = 0, True
        for start in range(0, len(wanted), MAX_REMOVED):
            end = SharedEnd()
            part = wanted[start : start + MAX_REMOVED]
            question = partial(remove_records, names=names, wanted=part, end=end, only_absent=only_absent)
            await self._ask(names.index, question, end, deadline_s, is_write=True)
            count += end.count
            is_whole &= end.status is SharedStatus.OK
            if end.status is SharedStatus.UNKNOWN:
                return None
        return count if is_whole else None

    async def look(self) -> None:
        """Say once of each server what about it will cost records later. Never fails."""
        servers = self._servers
        for node in [] if servers is None else servers.nodes:
            if node in self._looked or not node.health().is_up or not node.allows():
                continue
            said: list[str] = []
            (tally,) = await node.run(
                node.reads, [_info_work(said, self._clock)], self._clock() + CONTROL_TIMEOUT_S
            )
            if tally.was_answered and not tally.fault:
                self._looked.add(node)
                for remark in said:
                    _log.warning("records: %s: %s", node.address, remark)

    async def _ask(
        self, key: bytes, question: Question, result: R, deadline_s: float, *, is_write: bool = False
    ) -> R:
        """Ask the node that has a key; once more the one that it points to."""
        servers = self._servers
        if servers is None:
            result.problem = "not open"
            return result
        node, is_asking = servers.node_of(key), False
        for _ in range(2):
            if node is None:
                servers.look_again()
                result.problem = servers.trouble or "no server has it now"
                return result
            if not node.allows():
                result.problem = node.health().reason or "not used for now"
                return result
            work = _work(question, result, deadline_s, is_asking=is_asking)
            (tally,) = await node.run(node.writes if is_write else node.reads, [work], deadline_s)
            if tally.fault or tally.is_late:
                result.problem = tally.fault or "no answer in time"
            if tally.fault or tally.refuses_writes or not node.health().is_up:
                servers.look_again()
            redirect = tally.redirects.get(0)
            if redirect is None:
                break
            self.counters["redirected"] += 1
            if redirect.is_ask and is_write:
                # A slot on its way between two nodes takes no transactions; it has arrived soon.
                result.problem = "the slot is on its way to another node"
                break
            node, is_asking = servers.follow(node, redirect), redirect.is_ask
        if "NOPERM" in result.problem:
            self._refusals.warn(
                "records: %s: allow the user what records need: ACL SETUSER %s ~%s:* %s",
                *(result.problem, self._url.seeds[0].user or "default", self._prefix, RIGHTS),
            )
        return result

    def _count(self, event: str) -> None:
        self.counters[event] += 1


def _work(question: Question, result: Result, deadline_s: float, *, is_asking: bool) -> Work:
    def work(connection: RespConnection, tally: Tally) -> None:
        exchange = Exchange(connection, tally, result, deadline_s=deadline_s, is_asking=is_asking)
        try:
            question(exchange)
        except Answered:
            return

    return work


def _info_work(said: list[str], clock: Callable[[], float]) -> Work:
    def work(connection: RespConnection, tally: Tally) -> None:
        deadline_s = clock() + CONTROL_TIMEOUT_S
        connection.send([command(b"INFO")], deadline_s=deadline_s)
        reply = connection.read_reply(max_bytes=_INFO_BYTES, deadline_s=deadline_s)
        tally.was_answered = True
        if isinstance(reply, bytes):
            said.extend(_remarks(reply.decode("utf-8", "replace")))

    return work


def _remarks(info: str) -> list[str]:
    """Return what the settings of a server mean for records, with the remedy."""
    pairs = (line.partition(":") for line in info.splitlines() if not line.startswith("#"))
    told = {name: value.strip() for name, _, value in pairs}
    remarks: list[str] = []
    policy = told.get("maxmemory_policy", "")[:40]
    if policy and policy != "noeviction" and told.get("maxmemory", "0") != "0":
        remarks.append(
            f"has maxmemory-policy {policy}: when it is full, records may be evicted with the blocks: see"
            " docs/records.md"
        )
    if told.get("aof_enabled") == "0":
        remarks.append("keeps no append-only file: a restart of it loses records: set appendonly yes")
    return remarks
