"""Vault: one data key per tenant, made at its first block, kept wrapped, shared between nodes, and erased.

Where a key is. In memory; wrapped by the master key in a file beside each ssd folder; and, so that nodes with
the same master key have the same data keys, in a record in the remote tier. Erasing it overwrites all three.

Agreement. A key's number is one above the number of keys that were erased. The record in the remote tier
decides which key of a number is the tenant's; a node that made another one while that tier was away adopts
it, and keeps its own to read what it wrote. The higher number of erased keys wins on all sides, so a node
that was away forgets what was erased meanwhile. An erasure that could not be told is told as soon as the tier
answers, as one above all that are known there then.

Order in the remote tier. An erasure writes its number first and overwrites the key's record then; whoever
writes a key's record reads that number afterwards. So no key's record outlives its erasure.

The wrong master key. If a record in a file was made by a master key that is not given, the vault is down:
nothing is read, written, replaced or made until the right one is there.

Owner: one event loop's thread.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from kvstore.errors import TierUnavailable
from kvstore.key_exchange import Found, KeyExchange, Presence
from kvstore.key_file import KeyFile
from kvstore.keys import Namespace, NamespaceDigest
from kvstore.log_limit import LimitedWarning
from kvstore.master_keys import MasterKeys
from kvstore.tenant import TenantId, tenant_of
from kvstore.tenant_keys import StoredRecord, TenantKeys
from kvstore.tenant_record import RecordKind
from kvstore.tier import TierHealth
from kvstore_tiers.sealing import DataKey, Random, key_id

logger = logging.getLogger(__name__)

MAX_TENANTS = 65_536
"""How many tenants a node has keys for, or knows to be erased."""

_ASK_AGAIN_S = 0.25
_LOOK_AGAIN_S = 8.0
_KEEP_AGAIN_S = 5.0
_LOOK_AT_FILE_S = 5.0
_POLL_TENANTS = 128
_OPEN_S = 2.0
_MAX_OVERWRITTEN = 64

OnErased = Callable[[TenantId, Sequence[bytes]], Awaitable[object]]
"""Told of an erasure that another node began: whose keys, and the ids of those that were here.

``reopen`` must follow, as after ``forget``.
"""


class Vault:
    """The data keys of one node. ``file`` None: there is no ssd tier; ``exchange`` None: no remote one."""

    def __init__(
        self,
        masters: MasterKeys,
        *,
        file: KeyFile | None,
        exchange: KeyExchange | None,
        clock: Callable[[], float],
        random: Random = os.urandom,
    ) -> None:
        self._masters = masters
        self._keys = TenantKeys(masters, random=random)
        self._file = file
        self._exchange = exchange
        self._clock = clock
        self._namespace_of: Callable[[NamespaceDigest], Namespace | None] = lambda _: None
        self._on_erased: OnErased | None = None
        self._down = "not open"
        self._is_foreign = False
        self._keeping = asyncio.Lock()
        self._kept: frozenset[bytes] = frozenset()
        self._look_at_file_s = 0.0
        self._keep_again_s = 0.0
        self._running: dict[tuple[TenantId, str], asyncio.Task[None]] = {}
        self._clearing: set[asyncio.Task[None]] = set()
        self._turn = 0
        self._foreign = LimitedWarning(logger, interval_s=60.0, clock=clock)
        self._unkept = LimitedWarning(logger, interval_s=60.0, clock=clock)
        self._too_many = LimitedWarning(logger, interval_s=60.0, clock=clock)

    def follow(
        self, namespace_of: Callable[[NamespaceDigest], Namespace | None], on_erased: OnErased
    ) -> None:
        """Say how to find an open namespace, and whom to tell of other nodes' erasures."""
        self._namespace_of = namespace_of
        self._on_erased = on_erased

    def health(self) -> TierHealth:
        """Return whether keys can be had, and if not, why."""
        return TierHealth(not self._down, self._down)

    async def open(self) -> None:
        """Read the keys of earlier runs, and ask what other nodes did meanwhile. Never fails: see health."""
        known, is_changed = await self._read_files()
        if self._is_foreign:
            return
        self._keys.is_dirty |= is_changed
        self._keys.learn(known)
        self._kept = self._keys.ids()
        deadline_s = self._clock() + _OPEN_S
        tenants = self._keys.tenants()
        for start in range(0, len(tenants), _POLL_TENANTS):
            if self._clock() < deadline_s:
                await self._consult(tenants[start : start + _POLL_TENANTS])
        await self._keep()
        self._down = ""

    async def refresh(self) -> None:
        """Read the files again: a disk that came late may hold keys, and erasures, that the others do not."""
        if self._down:
            return
        known, _ = await self._read_files()
        if self._is_foreign:
            return
        for record, _ in known:
            if record.num_erased > self._keys.state(record.tenant).erased:
                self._hear(record.tenant, record.num_erased)
        self._keys.learn(known)
        self._keys.is_dirty = True
        await self._keep()

    async def _read_files(self) -> tuple[list[StoredRecord], bool]:
        """Return what the files hold, and whether they are to be written anew; down if a master key lacks."""
        if self._file is None:
            return [], False
        stored, problems = await asyncio.to_thread(self._file.read)
        for problem in problems:
            logger.error("keys: %s: what only it held the keys of is lost", problem)
        known, num_foreign = self._keys.parse(stored)
        if num_foreign:
            self._is_foreign = True
            self._down = (
                f"{num_foreign} of {len(stored)} records in the key file were made with another master key:"
                " put that one into the place that [encryption] keys names, and restart"
            )
            logger.error("keys: %s: nothing is read from or written to ssd and remote until then", self._down)
        return known, bool(problems) or (bool(stored) and self._file.num_files > 1)

    async def close(self) -> None:
        """Let what is under way end. Idempotent."""
        self._down = self._down or "closed"
        work = [*self._running.values(), *self._clearing]
        if work:
            await asyncio.wait(work)

    # Keys for copies

    async def sealing_key(self, namespace: NamespaceDigest, *, deadline_s: float) -> DataKey | None:
        """Return the key for a namespace's new copies, made if need be; None if there is none in time."""
        tenant = self._tenant_of(namespace)
        return None if tenant is None else await self.sealing_key_of(tenant, deadline_s=deadline_s)

    async def sealing_key_of(self, tenant: TenantId, *, deadline_s: float) -> DataKey | None:
        """The same for a tenant."""
        if self._down:
            return None
        if self._keys.present(tenant) is None:
            await self._within("make", tenant, self._make, deadline_s)
        return self._keys.present(tenant)

    async def opening_key(
        self, namespace: NamespaceDigest, key_id: bytes, *, deadline_s: float
    ) -> DataKey | None:
        """Return the key of that id; None if it is not known, or not that of the namespace's tenant."""
        tenant = self._tenant_of(namespace)
        if self._keys.find(key_id) is None and tenant is not None and not self._down:
            await self._within("ask", tenant, self._ask, deadline_s)
        key = self._keys.find(key_id)
        is_theirs = key is not None and (tenant is None or key.tenant == tenant)
        return key if is_theirs else None

    async def opening_key_of(self, tenant: TenantId, key_id: bytes, *, deadline_s: float) -> DataKey | None:
        """Return the key of that id; None if it is not known, or not that tenant's."""
        if self._keys.find(key_id) is None and not self._down:
            await self._within("ask", tenant, self._ask, deadline_s)
        key = self._keys.find(key_id)
        return key if key is not None and key.tenant == tenant else None

    async def shared_key_of(self, tenant: TenantId, *, deadline_s: float) -> DataKey | None:
        """The same as ``sealing_key_of``, but None unless the key outlives this process.

        That is, unless other nodes can have it too; or, where there are none, a file holds it.
        """
        key = await self.sealing_key_of(tenant, deadline_s=deadline_s)
        at = self._keys.state(tenant)
        if key is not None and self._exchange is not None and not at.is_published:
            at.looked_s = float("-inf")
            await self._within("publish", tenant, self._share, deadline_s)
            key = self._keys.present(tenant) if at.is_published else None
        elif key is not None and self._exchange is None and self._file is not None:
            if key.id not in self._kept:
                await self._within("keep", tenant, self._keep_for, deadline_s)
            key = self._keys.present(tenant)
            key = key if key is not None and key.id in self._kept else None
        return key

    async def _keep_for(self, tenant: TenantId) -> None:
        await self._keep()

    async def _share(self, tenant: TenantId) -> None:
        await self._consult([tenant])
        await self._keep()

    async def is_gone(self, tenant: TenantId, wanted: bytes) -> bool:
        """Return whether it is certain that the tenant's key of that id was erased, on every node.

        Asks the remote tier, which has the present key of each tenant; without its answer nothing is certain.
        """
        exchange = self._exchange
        if self._down or self.is_known(wanted):
            return False
        if exchange is None:
            return self._keys.is_erased(tenant)
        (number,) = await exchange.read_erased([tenant]) if exchange.is_up else (None,)
        if number is None:
            return False
        number = max(number, self._keys.state(tenant).erased)
        (found,) = await exchange.read_keys([(tenant, number + 1)])
        if not number or found.presence in (Presence.UNKNOWN, Presence.FOREIGN):
            return False
        self._take(tenant, number + 1, found)
        record = found.record
        is_present = record is not None and record.kind is RecordKind.KEY and key_id(record.secret) == wanted
        return not is_present and not self.is_known(wanted)

    def is_known(self, key_id: bytes) -> bool:
        """Return whether the key of that id can be had at once."""
        return self._keys.find(key_id) is not None

    def is_erased(self, namespace: NamespaceDigest) -> bool:
        """Return whether the namespace's tenant was erased at some time."""
        tenant = self._tenant_of(namespace)
        return tenant is not None and self._keys.is_erased(tenant)

    def has_key(self, namespace: NamespaceDigest) -> bool:
        """Return whether the namespace's tenant has a key at present."""
        tenant = self._tenant_of(namespace)
        return tenant is not None and self._keys.present(tenant) is not None

    # Erasing

    def forget(self, tenant: TenantId) -> list[bytes]:
        """Forget a tenant's keys in memory, at once; returns their ids.

        ``spread_erasure`` must follow; and ``reopen``, when nothing of what was stored before can be written
        any more.

        Raises:
            TierUnavailable: the master key is not the right one, so that no key can be looked at.
        """
        if self._down:
            raise TierUnavailable(f"keys: {self._down}")
        at = self._keys.state(tenant)
        at.is_untold = self._exchange is not None
        at.closings += 1
        return self._keys.lose(tenant, at.erased + 1)

    def reopen(self, tenant: TenantId) -> None:
        """Let a tenant have a key again after an erasure."""
        self._keys.state(tenant).closings -= 1

    async def spread_erasure(self, tenant: TenantId) -> list[str]:
        """Overwrite forgotten keys in the files and in the remote tier.

        Returns a line for each place that could not be reached: it is tried on and on.
        """
        problems = await self._keep()
        if self._exchange is not None and not await self._tell(tenant):
            problems.append(f"{self._exchange.name}: does not take the erasure now")
        return problems

    async def poll(self) -> None:
        """Follow other nodes for some of the tenants, and do again what could not be done."""
        if self._down:
            return
        if self._file is not None and self._file.has_come():
            await self.refresh()
        if self._clock() >= self._keep_again_s:
            await self._look_at_file()
            await self._keep()
        if self._exchange is None or not self._exchange.is_up:
            return
        for tenant in self._keys.untold()[:_POLL_TENANTS]:
            await self._tell(tenant)
        tenants = self._keys.tenants()
        start = self._turn * _POLL_TENANTS % max(1, len(tenants))
        self._turn += 1
        await self._consult(tenants[start : start + _POLL_TENANTS])

    def stats(self) -> dict[str, object]:
        """Return what there is, ready for JSON."""
        return {"is_on": True, "is_up": not self._down, "reason": self._down, **self._keys.counts()}

    async def _look_at_file(self) -> None:
        """Have the files written anew that somebody else removed or replaced: without them all is lost."""
        if self._file is None or self._clock() < self._look_at_file_s:
            return
        self._look_at_file_s = self._clock() + _LOOK_AT_FILE_S
        async with self._keeping:
            changed = await asyncio.to_thread(self._file.forget_changed)
        for path in changed:
            logger.warning("keys: %s was removed or replaced by somebody else: it is written anew", path)
        self._keys.is_dirty |= bool(changed)

    async def _keep(self) -> list[str]:
        """Write the files if anything changed; returns one line for each that could not be."""
        async with self._keeping:
            if not self._keys.is_dirty or self._file is None:
                return []
            self._keys.is_dirty = False
            ids = self._keys.ids()
            problems = await asyncio.to_thread(self._file.write, self._keys.records())
            if len(problems) < self._file.num_files:
                self._kept = ids
            if problems:
                self._keys.is_dirty = True
                self._keep_again_s = self._clock() + _KEEP_AGAIN_S
                self._unkept.warn("keys: %s; it is tried again", "; ".join(problems))
            return problems

    # Making and asking

    def _tenant_of(self, namespace: NamespaceDigest) -> TenantId | None:
        known = self._namespace_of(namespace)
        return None if known is None else tenant_of(known.tenant_salt)

    async def _within(
        self,
        what: str,
        tenant: TenantId,
        work: Callable[[TenantId], Coroutine[Any, Any, None]],  # Any: what coroutines yield and are sent
        deadline_s: float,
    ) -> None:
        """Have a tenant's key made or asked for, by one task for all who want it; wait until a deadline."""
        task = self._running.get((tenant, what))
        if task is None:
            task = asyncio.create_task(work(tenant), name=f"vault-{what}")
            self._running[tenant, what] = task
            task.add_done_callback(lambda ended: self._end(tenant, what, ended))
        await asyncio.wait([task], timeout=max(0.0, deadline_s - self._clock()))

    def _end(self, tenant: TenantId, what: str, task: "asyncio.Task[None]") -> None:
        del self._running[tenant, what]
        if not task.cancelled() and task.exception() is not None:
            logger.error("keys: a key could not be had", exc_info=task.exception())

    async def _ask(self, tenant: TenantId) -> None:
        """Ask other nodes for the tenant's key, now and then."""
        at = self._keys.state(tenant)
        if self._clock() >= at.asked_s + _ASK_AGAIN_S:
            at.asked_s, at.looked_s = self._clock(), float("-inf")
            await self._consult([tenant])
            await self._keep()

    async def _make(self, tenant: TenantId) -> None:
        """Ask other nodes for the tenant's key, and make one if there is none."""
        at = self._keys.state(tenant)
        at.looked_s = float("-inf")
        await self._consult([tenant])
        if at.is_foreign or at.closings or self._down:
            return
        if not at.held and self._keys.num_known >= MAX_TENANTS:
            self._too_many.warn("keys: %d tenants have a key or had one: no more are made", MAX_TENANTS)
            return
        if not at.held:
            self._keys.make(tenant)
            await self._publish(tenant)
        await self._keep()

    # Other nodes

    async def _consult(self, tenants: Sequence[TenantId]) -> None:
        """Exchange erasures, and now and then keys, of some tenants with the remote tier."""
        exchange = self._exchange
        if exchange is None or not tenants or not exchange.is_up:
            return
        for tenant, number in zip(tenants, await exchange.read_erased(tenants), strict=True):
            at = self._keys.state(tenant)
            if number is not None and number > at.erased:
                self._hear(tenant, number)
            elif number is not None and number < at.erased and not at.is_untold:
                await exchange.tell_erased(tenant, at.erased, keys=[])
        wanted = [(tenant, self._keys.state(tenant).number) for tenant in tenants if self._is_due(tenant)]
        for (tenant, number), found in zip(wanted, await exchange.read_keys(wanted), strict=True):
            self._take(tenant, number, found)
            await self._offer(tenant, number, found)

    def _is_due(self, tenant: TenantId) -> bool:
        """Whether the record of a tenant's key is to be read now."""
        at = self._keys.state(tenant)
        return not at.is_published or self._clock() >= at.looked_s + _LOOK_AGAIN_S

    def _take(self, tenant: TenantId, number: int, found: Found) -> None:
        """Adopt the key that the remote tier has for a tenant, unless it was erased meanwhile."""
        at = self._keys.state(tenant)
        at.looked_s = self._clock()
        at.is_foreign = found.presence is Presence.FOREIGN
        if at.is_foreign:
            self._foreign.warn(
                "keys: a tenant's key in the remote tier was made with another master key: its blocks are"
                " not served, and none are stored unless there is a key for it here"
            )
        record = found.record
        if record is None or number != at.number:
            return
        if record.kind is RecordKind.KEY:
            self._keys.hold(record, found.packed, is_first=True)
            at.is_published = True
        else:
            self._hear(tenant, record.number)

    async def _offer(self, tenant: TenantId, number: int, found: Found) -> None:
        """Give the remote tier what it lacks: the tenant's key, or the one it has wrapped anew, once."""
        at, record = self._keys.state(tenant), found.record
        if number != at.number:
            return
        if found.presence in (Presence.ABSENT, Presence.BROKEN):
            await self._publish(tenant, replaces=found.presence is Presence.BROKEN)
        elif record is not None and record.master_id != self._masters.present.id and not at.is_rewrapped:
            at.is_rewrapped = True
            await self._publish(tenant, replaces=True)

    async def _publish(self, tenant: TenantId, *, replaces: bool = False) -> None:
        """Offer the tenant's key to other nodes; where one was faster, its key is adopted."""
        at, exchange = self._keys.state(tenant), self._exchange
        if exchange is None or not exchange.is_up or not at.held:
            return
        number, packed = at.number, at.held[0].packed
        if not await exchange.publish(tenant, number, packed, replaces=replaces):
            (found,) = await exchange.read_keys([(tenant, number)])
            self._take(tenant, number, found)
            return
        (erased,) = await exchange.read_erased([tenant])
        erased = max(erased or 0, at.erased)
        if erased < number:
            at.is_published = True
            return
        await exchange.tell_erased(tenant, erased, keys=[number])
        if erased > at.erased:
            self._hear(tenant, erased)

    def _hear(self, tenant: TenantId, number: int) -> None:
        """Follow an erasure of another node."""
        at = self._keys.state(tenant)
        key_ids = self._keys.lose(tenant, number)
        at.told = at.told if at.is_untold else at.erased
        if self._on_erased is not None and not self._down:
            logger.info("keys: a tenant was erased on another node")
            at.closings += 1
            task = asyncio.create_task(self._clear(self._on_erased, tenant, key_ids), name="vault-clear")
            self._clearing.add(task)
            task.add_done_callback(self._clearing.discard)

    async def _clear(self, on_erased: OnErased, tenant: TenantId, key_ids: Sequence[bytes]) -> None:
        try:
            await on_erased(tenant, key_ids)
        except Exception:
            logger.exception("keys: forgetting the blocks of an erased tenant failed")

    async def _tell(self, tenant: TenantId) -> bool:
        """Tell other nodes of an erasure; False if they could not be."""
        at, exchange = self._keys.state(tenant), self._exchange
        if exchange is None or not exchange.is_up:
            return False
        (known,) = await exchange.read_erased([tenant])
        if known is None:
            return False
        if known > at.told and known >= at.erased:
            # Others erased meanwhile, and may have made a newer key since: that one goes too.
            self._keys.lose(tenant, known + 1)
        number = at.erased
        keys = range(max(at.told, number - _MAX_OVERWRITTEN) + 1, number + 1)
        if not await exchange.tell_erased(tenant, number, keys=keys):
            return False
        at.told = number
        at.is_untold = number != at.erased
        self._keys.is_dirty = True
        await self._keep()
        return not at.is_untold
