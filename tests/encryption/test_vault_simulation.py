"""Random histories of nodes that make, share and erase keys, with partitions, restarts and evictions."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.key_exchange import KeyExchange, erased_record_id, key_record_id
from kvstore.key_file import KeyFile
from kvstore.keys import Namespace
from kvstore.master_keys import MasterKeys
from kvstore.tenant import TenantId
from kvstore.tenant_record import RECORD_BYTES, RecordKind, TenantRecord
from kvstore.testing import FakeClock, FaultyTier, MemoryTier
from kvstore.tier import Medium
from kvstore.vault import Vault
from tests.encryption.node import ANN, BOB, MASTER, tenant

SPACES = {space.digest: space for space in (ANN, BOB)}
MASTERS = MasterKeys.parse(MASTER, key="keys")


class Cluster:
    """Three nodes over one shared tier, each of which may be cut off from it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.dice = random.Random(seed)
        self.clock = FakeClock()
        self.shared = MemoryTier(name="remote", medium=Medium.REMOTE, is_shared=True)
        self.links: list[FaultyTier] = []
        self.vaults: list[Vault] = []
        self.erased_ids: dict[TenantId, set[bytes]] = {tenant(ANN): set(), tenant(BOB): set()}
        self.ids: dict[TenantId, set[bytes]] = {tenant(ANN): set(), tenant(BOB): set()}

    async def open(self, number: int) -> Vault:
        folder = self.folder / str(number)
        folder.mkdir(exist_ok=True)
        vault = Vault(
            MASTERS,
            file=KeyFile([folder], record_bytes=RECORD_BYTES, in_use=lambda: [folder]),
            exchange=KeyExchange(self.links[number], MASTERS, clock=self.clock),
            clock=self.clock,
        )

        async def on_erased(erased: TenantId, _ids: Sequence[bytes]) -> None:
            vault.reopen(erased)

        vault.follow(SPACES.get, on_erased)
        await vault.open()
        return vault

    async def start(self) -> None:
        await self.shared.open()
        for number in range(3):
            self.links.append(FaultyTier(self.shared))
            self.vaults.append(await self.open(number))

    async def step(self) -> None:
        number = self.dice.randrange(3)
        vault, space = self.vaults[number], self.dice.choice([ANN, BOB])
        self.clock.advance(self.dice.choice([0.1, 1.0, 10.0]))
        match self.dice.randrange(12):
            case 0 | 1 | 2:
                await self.seal(vault, space)
            case 3:
                await self.erase(vault, space)
            case 4 | 5:
                self.links[number].is_down = not self.links[number].is_down
            case 6:
                await vault.close()
                self.vaults[number] = await self.open(number)
            case 7:
                self.evict(space)
            case 8:
                await self.ask(vault, space)
            case _:
                await vault.poll()

    async def seal(self, vault: Vault, space: Namespace) -> None:
        key = await vault.sealing_key(space.digest, deadline_s=self.clock() + 30)
        # None: it has just heard of an erasure, whose blocks are being forgotten.
        if key is not None:
            assert not key.is_forgotten
            self.ids[tenant(space)].add(key.id)

    async def ask(self, vault: Vault, space: Namespace) -> None:
        for known in self.dice.sample(sorted(self.ids[tenant(space)]), min(1, len(self.ids[tenant(space)]))):
            await vault.opening_key(space.digest, known, deadline_s=self.clock() + 30)

    async def erase(self, vault: Vault, space: Namespace) -> None:
        # Whatever this node knew of is gone for good; so is all that others have at that time, once told.
        self.erased_ids[tenant(space)].update(vault.forget(tenant(space)))
        await vault.spread_erasure(tenant(space))
        vault.reopen(tenant(space))

    def evict(self, space: Namespace) -> None:
        records = [erased_record_id(tenant(space)), *(key_record_id(tenant(space), n) for n in range(1, 20))]
        self.shared.stored.pop(self.dice.choice(records).storage_key, None)

    def has_key_record(self, space: Namespace, number: int) -> bool:
        """Whether a wrapped key of that number is in the shared tier."""
        _, packed = self.shared.stored.get(key_record_id(tenant(space), number).storage_key, (None, b""))
        return bool(packed) and TenantRecord.unpack(packed, MASTERS).kind is RecordKind.KEY

    async def heal(self) -> None:
        for link in self.links:
            link.is_down = False
        for _ in range(4):
            for vault in self.vaults:
                self.clock.advance(10)
                await vault.poll()


@pytest.mark.parametrize("seed", range(40))
async def test_nodes_agree_in_the_end_and_nobody_has_an_erased_key(tmp_path: Path, seed: int) -> None:
    cluster = Cluster(tmp_path, seed)
    await cluster.start()
    for _ in range(60):
        await cluster.step()
    await cluster.heal()

    for space in (ANN, BOB):
        keys = [await v.sealing_key(space.digest, deadline_s=cluster.clock() + 30) for v in cluster.vaults]
        assert len({key.id for key in keys if key is not None}) == 1
        erased = cluster.erased_ids[tenant(space)]
        assert not any(vault.is_known(known) for vault in cluster.vaults for known in erased)
        numbers = {vault._keys.state(tenant(space)).erased for vault in cluster.vaults}
        assert len(numbers) == 1
        assert not any(cluster.has_key_record(space, number) for number in range(1, numbers.pop() + 1))
    assert not any(vault.stats()["untold_erasures"] for vault in cluster.vaults)
    for number in range(3):
        again = await cluster.open(number)
        for space in (ANN, BOB):
            assert not any(again.is_known(known) for known in cluster.erased_ids[tenant(space)])
