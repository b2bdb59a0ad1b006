"""RemoteTier: copies on Redis-protocol servers that every replica can reach: one, a master behind sentinels,
or a cluster.

Values. One key per block holds header and payload together, so that the server evicts whole blocks only.
What comes back is checked like anything from outside: header, key, part, namespace, layout, length, checksum.

Calls. A call's blocks are grouped by the node that has them, and each group is split into shares that run at
the same time (see remote_node). A block that its node says is elsewhere is asked for there, once, within the
same deadline. A node that fails costs its own blocks only. Opening the tier with every server absent is
normal.
"""

import asyncio
import logging
import ssl
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from kvstore.keys import Namespace
from kvstore.miss import MissReason
from kvstore.tier import (
    BlockHeader,
    BlockId,
    Medium,
    Probe,
    ReadOutcome,
    ReadRequest,
    ReadStatus,
    TierHealth,
    WriteRequest,
    WriteStatus,
)
from kvstore_tiers.remote_batch import Batch, Ending, shares_of
from kvstore_tiers.remote_look import Use
from kvstore_tiers.remote_node import NodeSettings, RemoteNode, Work
from kvstore_tiers.remote_servers import servers_of, with_tls
from kvstore_tiers.remote_session import KeyNames, Redirect, drop_share, probe_share, read_share, write_share
from kvstore_tiers.remote_tls import TlsFolder
from kvstore_tiers.remote_topology import Servers
from kvstore_tiers.remote_url import RemoteUrl, Topology
from kvstore_tiers.resp_address import RespAddress

_log = logging.getLogger(__name__)

_MAX_SHARES = 2
"""Most connections that one call uses to one server; other calls have the others.

Two pipelined ones keep a server's one thread busy. More only take turns: measured, docs/remote.md.
"""

T = TypeVar("T")


class RemoteTier:
    """A shared Tier on Redis or Valkey.

    ``url`` is as in ``RemoteUrl``; ``sentinel_master`` is the name that sentinels know the master by.
    ``num_connections`` and the breaker are per node.
    """

    def __init__(
        self,
        url: str,
        *,
        user: str = "",
        password: str = "",
        sentinel_master: str = "mymaster",
        key_prefix: str = "kvstore",
        ttl_s: float | None = None,
        timeout_s: float = 0.5,
        num_connections: int = 4,
        breaker_backoff_s: float = 0.25,
        breaker_backoff_max_s: float = 8.0,
        tls: TlsFolder | ssl.SSLContext | None = None,
        name: str = "remote",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = RemoteUrl.parse(url, user=user, password=password)
        self._sentinel_master = sentinel_master
        self._tls = tls
        self._name = name
        self._clock = clock
        self._names = KeyNames(key_prefix, ttl_s)
        self._counters: Counter[str] = Counter()
        self._settings = NodeSettings(
            name=name,
            timeout_s=timeout_s,
            num_connections=num_connections,
            backoff_s=breaker_backoff_s,
            backoff_max_s=breaker_backoff_max_s,
            clock=clock,
            count=self._count_one,
            remark=self._tell_once,
            use=Use(key_prefix, expires=ttl_s is not None, is_cluster=self._url.topology is Topology.CLUSTER),
        )
        self._remarks: set[str] = set()
        self._servers: Servers | None = None

    @property
    def name(self) -> str:
        """The tier's name in configuration, metrics and messages."""
        return self._name

    @property
    def medium(self) -> Medium:
        """A remote server."""
        return Medium.REMOTE

    @property
    def is_shared(self) -> bool:
        """True: other stores write to it, and it evicts by itself."""
        return True

    @property
    def capacity_bytes(self) -> int:
        """0: the server bounds itself."""
        return 0

    @property
    def used_bytes(self) -> int:
        """0: unknown here."""
        return 0

    @property
    def counters(self) -> dict[str, int]:
        """Events so far: faults, corrupt, mismatched, full, refused, redirected, breaker_opened."""
        return dict(self._counters)

    def health(self) -> TierHealth:
        """Return whether any server is worth asking now."""
        servers = self._servers
        if servers is None:
            return TierHealth(is_up=False, reason="not open")
        healths = [node.health() for node in servers.nodes]
        down = [health for health in healths if not health.is_up]
        if not healths:
            return TierHealth(is_up=False, reason=servers.trouble)
        return down[0] if len(down) == len(healths) else TierHealth(is_up=True)

    async def open(self) -> None:
        """Make the tier usable. A server that is absent is a warning: the tier heals when it comes.

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
        elif servers.trouble:
            _log.warning("%s: %s: not reachable yet: %s", self._name, self._url, servers.trouble)

    async def close(self) -> None:
        """Finish what is under way and close the connections. Idempotent."""
        servers, self._servers = self._servers, None
        if servers is not None:
            await servers.close()

    async def scan(self) -> list[BlockHeader]:
        """Return nothing: what a shared tier holds is asked by ``probe``."""
        return []

    def open_namespace(self, namespace: Namespace) -> None:
        """Need not know: every value carries its layout."""

    async def probe(self, blocks: Sequence[BlockId], *, deadline_s: float) -> Probe:
        """For each block: this tier's name if a server has it. A node stops near its first absent one."""
        found: list[bool | None] = [None] * len(blocks)

        def work(share: Sequence[tuple[int, BlockId]], is_asking: bool) -> Work:
            return lambda connection, tally: probe_share(
                *(connection, self._names, share, found),
                tally=tally,
                is_asking=is_asking,
                deadline_s=deadline_s,
            )

        ending = await self._run(Batch(blocks, _itself, work, 1, is_write=False, deadline_s=deadline_s))
        unknown = {index: reason for index, reason in ending.reasons.items() if found[index] is None}
        first = next((index for index, is_here in enumerate(found) if not is_here), None)
        reason = None if first is None or found[first] is False else ending.reason(first)
        tiers = [self._name if is_here else None for is_here in found]
        num_known = next((at for at, is_here in enumerate(found) if is_here is None), None)
        return Probe(tiers, reason, unknown, num_known)

    async def read(self, requests: Sequence[ReadRequest], *, deadline_s: float) -> list[ReadOutcome]:
        """Read copies into the buffers, and verify them."""
        outcomes: list[ReadOutcome | None] = [None] * len(requests)
        for request in requests:
            assert request.buffer.nbytes >= request.length_bytes, f"{self._name}: the buffer is too short"

        def work(share: Sequence[tuple[int, ReadRequest]], is_asking: bool) -> Work:
            return lambda connection, tally: read_share(
                *(connection, self._names, share, outcomes),
                tally=tally,
                origin=self._name,
                is_asking=is_asking,
                deadline_s=deadline_s,
            )

        most = min(_MAX_SHARES, self._settings.num_connections)
        batch = Batch(requests, _block_read, work, most, is_write=False, deadline_s=deadline_s)
        ending = await self._run(batch)
        results = [outcome or _unread(ending.reason(index)) for index, outcome in enumerate(outcomes)]
        self._count(
            corrupt=_tell(results, ReadStatus.CORRUPT), mismatched=_tell(results, ReadStatus.MISMATCH)
        )
        return results

    async def write(self, requests: Sequence[WriteRequest], *, deadline_s: float) -> list[WriteStatus]:
        """Write copies; a present one is replaced."""
        statuses: list[WriteStatus | None] = [None] * len(requests)

        def work(share: Sequence[tuple[int, WriteRequest]], is_asking: bool) -> Work:
            return lambda connection, tally: write_share(
                *(connection, self._names, share, statuses),
                tally=tally,
                is_asking=is_asking,
                deadline_s=deadline_s,
            )

        most = min(_MAX_SHARES, max(1, self._settings.num_connections // 2))
        batch = Batch(requests, _block_written, work, most, is_write=True, deadline_s=deadline_s)
        ending = await self._run(batch)
        results = [status or _unwritten(ending.reason(index)) for index, status in enumerate(statuses)]
        self._count(full=results.count(WriteStatus.FULL), refused=results.count(WriteStatus.REFUSED))
        return results

    async def drop(self, blocks: Sequence[BlockId]) -> int:
        """Forget copies, if their servers answer in time."""
        dropped: list[int] = []
        deadline_s = self._clock() + self._settings.timeout_s

        def work(share: Sequence[tuple[int, BlockId]], is_asking: bool) -> Work:
            return lambda connection, tally: drop_share(
                *(connection, self._names, share),
                tally=tally,
                is_asking=is_asking,
                deadline_s=deadline_s,
                dropped=dropped,
            )

        await self._run(Batch(blocks, _itself, work, 1, is_write=True, deadline_s=deadline_s))
        return len(set(dropped))

    async def touch(self, blocks: Sequence[BlockId]) -> None:
        """Do nothing: the server notes the use of what it serves."""

    def has_room(self, length_bytes: int, count: int = 1) -> bool:
        """Return True: the server evicts, or refuses with FULL."""
        return True

    async def _run(self, batch: Batch[T]) -> Ending:
        """Do a call's items at their nodes, and those that turn out to be elsewhere there, once."""
        servers = self._servers
        if servers is None or not batch.items:
            return Ending()
        groups: dict[tuple[RemoteNode, bool], list[int]] = {}
        homeless: list[int] = []
        for index, item in enumerate(batch.items):
            node = servers.node_of(self._names.of(batch.block_of(item)))
            if node is None:
                homeless.append(index)
                servers.look_again()
            else:
                groups.setdefault((node, False), []).append(index)
        ending = await self._ask_nodes(servers, batch, groups)
        ending.note(homeless, MissReason.UNAVAILABLE)
        if ending.moved:
            groups = {}
            for index, target in ending.moved.items():
                groups.setdefault(target, []).append(index)
            again = await self._ask_nodes(servers, batch, groups)
            ending.reasons |= again.reasons
        return ending

    async def _ask_nodes(
        self, servers: Servers, batch: Batch[T], groups: dict[tuple[RemoteNode, bool], list[int]]
    ) -> Ending:
        """Ask every node for its items at the same time; returns when no thread is at them any more."""
        ending = Ending()
        asked = []
        for (node, is_asking), indexes in groups.items():
            if node.allows():
                asked.append(self._ask_node(servers, batch, node, indexes, ending, is_asking=is_asking))
            else:
                ending.note(indexes, MissReason.BREAKER_OPEN)
        if len(asked) == 1:
            await asked[0]
        elif asked:
            async with asyncio.TaskGroup() as group:
                for call in asked:
                    group.create_task(call)
        return ending

    async def _ask_node(
        self,
        servers: Servers,
        batch: Batch[T],
        node: RemoteNode,
        indexes: Sequence[int],
        ending: Ending,
        *,
        is_asking: bool,
    ) -> None:
        jobs = node.writes if batch.is_write else node.reads
        shares = shares_of([(index, batch.items[index]) for index in indexes], batch.max_shares)
        works = [batch.work(share, is_asking) for share in shares]
        tallies = await node.run(jobs, works, batch.deadline_s)
        for share, tally in zip(shares, tallies, strict=True):
            if tally.is_late or tally.fault:
                reason = MissReason.TIMED_OUT if tally.is_late else MissReason.UNAVAILABLE
                ending.note((index for index, _ in share), reason)
            if tally.redirects:
                self._note_redirects(servers, node, tally.redirects, ending)
        if any(tally.fault or tally.refuses_writes for tally in tallies) or not node.health().is_up:
            servers.look_again()

    def _note_redirects(
        self, servers: Servers, node: RemoteNode, redirects: Mapping[int, Redirect], ending: Ending
    ) -> None:
        for index, redirect in redirects.items():
            target = servers.follow(node, redirect)
            if target is not None:
                ending.moved[index] = (target, redirect.is_ask)
            elif not self._counters["redirected"]:
                _log.warning(
                    "%s: %s belongs to a cluster: write redis+cluster:// in the url", self._name, node.address
                )
        self._count(redirected=len(redirects))

    def _tell_once(self, address: RespAddress, remark: str) -> None:
        """Warn of something amiss; all servers are often set up in the same way."""
        if remark not in self._remarks:
            self._remarks.add(remark)
            _log.warning("%s: %s: %s", self._name, address, remark)

    def _count_one(self, event: str) -> None:
        self._counters[event] += 1

    def _count(self, **events: int) -> None:
        self._counters.update({event: count for event, count in events.items() if count})


def _itself(block: BlockId) -> BlockId:
    return block


def _block_read(request: ReadRequest) -> BlockId:
    return request.block


def _block_written(request: WriteRequest) -> BlockId:
    return request.header.block


def _unread(reason: MissReason) -> ReadOutcome:
    status = ReadStatus.TIMED_OUT if reason is MissReason.TIMED_OUT else ReadStatus.UNAVAILABLE
    return ReadOutcome(status, reason=reason)


def _unwritten(reason: MissReason) -> WriteStatus:
    return WriteStatus.TIMED_OUT if reason is MissReason.TIMED_OUT else WriteStatus.UNAVAILABLE


def _tell(outcomes: Sequence[ReadOutcome], status: ReadStatus) -> int:
    return sum(outcome.status is status for outcome in outcomes)
