"""PolicyKeeper: keeps what the policies of one manager learned across its restarts.

What was learned makes a policy better and no answer right: it is kept as well as that comes cheap. Files are
read and written on a thread of their own, which a hung disk may keep; nobody waits for it for longer than
PATIENCE_S. What cannot be trusted is ignored, with one line in the log.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from kvstore.errors import CorruptBlock, InvalidConfig, InvalidRequest
from kvstore.policy import EvictionPolicy, NamespacePolicies, NewPolicy, in_force, policy_name, policy_named
from kvstore.policy_file import Learned, PolicyFile
from kvstore.policy_plan import EVERYWHERE, Place, PolicyPlan
from kvstore.state import State
from kvstore.succession import Succession
from kvstore.tier import SlotTier, StorageKey, Tier

logger = logging.getLogger(__name__)

T = TypeVar("T")

KEEP_S = 300.0
"""How often what was learned is written while the store serves."""

PATIENCE_S = 2.0
"""How long a start or an end waits for the disk."""

_SLICE_BLOCKS = 128
"""Blocks that come under another policy between two turns of others: about a millisecond."""


def policies_of(tiers: Sequence[SlotTier | Tier], plan: NewPolicy | PolicyPlan) -> dict[str, EvictionPolicy]:
    """Return fresh policies by tier: as planned, or of one kind for all.

    Raises:
        InvalidRequest: the plan names a tier that is none of these.
    """
    if not isinstance(plan, PolicyPlan):
        return {tier.name: plan(tier.capacity_bytes) for tier in tiers}
    unknown = plan.tiers() - {tier.name for tier in tiers}
    if unknown:
        known = ", ".join(tier.name for tier in tiers)
        raise InvalidRequest(f"policy: no tier {min(unknown)!r} that has one, expected one of {known}")
    return {tier.name: _planned(plan, tier) for tier in tiers}


def _planned(plan: PolicyPlan, tier: SlotTier | Tier) -> EvictionPolicy:
    capacity_bytes = tier.capacity_bytes
    rest = policy_named(plan.of_tier(tier.name))(capacity_bytes)
    own = plan.own_of(tier.name)
    if not own:
        return rest
    return NamespacePolicies(rest, {digest: policy_named(own[digest])(capacity_bytes) for digest in own})


def plan_in_force(policies: Mapping[str, EvictionPolicy], top: str) -> PolicyPlan:
    """Return the plan that policies by tier come from, of which that of the top tier holds everywhere."""
    rules: dict[Place, str] = {EVERYWHERE: policy_name(policies[top])}
    for tier, policy in policies.items():
        if policy_name(policy) != rules[EVERYWHERE]:
            rules[tier, None] = policy_name(policy)
    now = [in_force(policy) for policy in policies.values()]
    shared = [policy.own if isinstance(policy, NamespacePolicies) else {} for policy in now]
    for tier, own in zip(policies, shared, strict=True):
        for digest, policy in own.items():
            name = policy_name(policy)
            is_same = all(digest in others and policy_name(others[digest]) == name for others in shared)
            rules[None if is_same else tier, digest] = name
    return PolicyPlan(rules)


def adopt(state: State, policy: EvictionPolicy, tier: str, names: Sequence[StorageKey]) -> None:
    """Have a policy learn of blocks that a tier holds, the least recently used first."""
    by_size: dict[int, tuple[list[StorageKey], list[StorageKey | None]]] = {}
    for name in names:
        entry = state.directory.find(name)
        assert entry is not None, "a block that was filed has no entry"
        is_counted = entry.parent is not None and entry.copies[tier].is_counted
        group = by_size.setdefault(entry.length_bytes, ([], []))
        group[0].append(name)
        group[1].append(entry.shelf.name(entry.parent) if is_counted and entry.parent else None)
    for size_bytes, (blocks, parents) in by_size.items():
        policy.adopt(blocks, parents, size_bytes=size_bytes, now_s=state.clock())


class PolicyKeeper:
    """Reads what earlier runs learned, and writes what this one does. ``file`` None: neither.

    It changes the policies too: blocks stay, in the order in which the policy before would have evicted them.
    """

    def __init__(self, state: State, file: PolicyFile | None) -> None:
        self._state = state
        self._file = file
        self._is_busy = False
        self._is_open = False
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Future[str]] = set()

    async def open(self) -> None:
        """Take over what earlier runs learned; what is doubtful is left."""
        if self._file is None:
            return
        learned = await self._on_disk(self._file.read, "not taken over")
        for tier, (name, saved) in (learned or {}).items():
            self._take_over(tier, name, saved)
        self._is_open = True

    def _take_over(self, tier: str, name: str, saved: dict[str, object]) -> None:
        policy = self._state.policies.get(tier)
        if policy is None:
            return
        if policy_name(policy) != name:
            logger.info("%s: policy statistics are of %s: not taken over", tier, name)
            return
        try:
            policy.from_state(saved)
        except ValueError as error:
            logger.warning("%s: policy statistics are doubtful: not taken over: %s", tier, error)

    async def change(self, text: str) -> str:
        """Give tiers or namespaces other policies, as a plan's text says; returns the plan before.

        Leases and blocks are as before: the new policies order them. What a policy before learned goes with
        it, unless its successor is of the same kind, and so do its ghosts. A tier of which the text changes
        nothing keeps all. Blocks come under it a slice at a time; it goes on if the caller is cancelled. One
        at a time.

        Raises:
            InvalidRequest: it is no plan, or names a tier that has no policy.
        """
        change = asyncio.ensure_future(self._change(text))
        self._changes.add(change)
        change.add_done_callback(self._changes.discard)
        return await asyncio.shield(change)

    async def _change(self, text: str) -> str:
        state = self._state
        async with self._changing:
            before = plan_in_force(state.policies, state.top.name)
            try:
                plan = before.amended(text)
            except InvalidConfig as error:
                raise InvalidRequest(str(error)) from error
            tiers = [tier for tier in state.all_tiers() if tier.name in state.policies]
            for tier, policy in policies_of(tiers, plan).items():
                if plan.of_tier(tier) != before.of_tier(tier) or plan.own_of(tier) != before.own_of(tier):
                    await self._succeed(tier, policy)
            logger.info("policy: %s from now on, %s before", plan, before)
            return str(before)

    async def _succeed(self, tier: str, policy: EvictionPolicy) -> None:
        """Have one policy take over from another; between two slices others have their turn."""
        state = self._state
        old = state.policies[tier]
        if policy_name(old) == policy_name(policy) and (learned := old.to_state()):
            policy.from_state(learned)
        state.policies[tier] = both = Succession(old, policy)
        while blocks := both.take(_SLICE_BLOCKS, now_s=state.clock()):
            adopt(state, both, tier, blocks)
            await asyncio.sleep(0)
        if len(both.predecessor):  # what it does not name as a candidate
            left = [entry.name for entry in state.directory.entries() if entry.name in both.predecessor]
            for start in range(0, len(left), _SLICE_BLOCKS):
                blocks = [name for name in left[start : start + _SLICE_BLOCKS] if name in both.predecessor]
                for name in blocks:
                    both.predecessor.remove(name)
                adopt(state, both, tier, blocks)
                await asyncio.sleep(0)
        state.policies[tier] = policy

    async def close(self) -> None:
        """Leave a change that is under way as far as it has come."""
        for change in self._changes:
            change.cancel()
        await asyncio.gather(*self._changes, return_exceptions=True)

    async def keep_forever(self) -> None:
        """Write now and then, until cancelled."""
        while True:
            await asyncio.sleep(KEEP_S)
            try:
                await self.keep()
            except Exception:
                logger.exception("keeping the policies' statistics failed")

    async def keep(self) -> None:
        """Write what was learned so far; waits for PATIENCE_S at most."""
        file = self._file
        if file is None or not self._is_open:
            return
        learned: Learned = {}
        for tier, policy in self._state.policies.items():
            saved = policy.to_state()
            if saved:
                learned[tier] = (policy_name(policy), saved)
        if learned:
            await self._on_disk(lambda: file.write(learned), "not kept")

    async def _on_disk(self, work: Callable[[], T], failing: str) -> T | None:
        """Do ``work`` on a thread; None if it fails, takes too long, or an earlier one is still at it.

        Only the disk of a tier that is up is touched: another process may have the one of a tier that is not.
        """
        is_up = any(not tier.is_shared and tier.health().is_up for tier in self._state.lower)
        if self._is_busy or not is_up:
            return None
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._is_busy = True

        def settle(result: T | None, error: Exception | None) -> None:
            self._is_busy = False
            if done.cancelled():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]  # without an error there is a result

        def run() -> None:
            result, failed = None, None
            try:
                result = work()
            except Exception as error:  # handed to the task that waits
                failed = error
            try:
                loop.call_soon_threadsafe(settle, result, failed)
            except RuntimeError:
                return  # the loop has ended meanwhile: nobody wants to know

        threading.Thread(target=run, name="kvstore-policies", daemon=True).start()
        try:
            return await asyncio.wait_for(done, PATIENCE_S)
        except TimeoutError:
            logger.warning(
                "policy statistics: %s has taken more than %g s: %s", self._file, PATIENCE_S, failing
            )
        except (CorruptBlock, OSError) as error:
            logger.warning("policy statistics: %s: %s: %s", self._file, failing, error)
        return None
