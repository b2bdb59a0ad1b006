"""Faults of the ssd tier's content and disk: flipped bits, planted blocks, cut files, failing writes."""

import resource
import shutil

from kvstore.drill.fault import Fault
from kvstore.drill.load import Load
from kvstore.drill.slab_surgery import SlabFile, flip_bits_in_used_pages
from kvstore.drill.stage import Stage, pause
from kvstore.keys import BlockKey


class _SlabDamage(Fault):
    """Damage to slots of a running store, found when dram no longer holds the blocks."""

    weight = 3.0
    effect = "blocks_refused"

    def inject(self, stage: Stage) -> None:
        """Damage slots, push the blocks out of dram, and ask for them."""
        if stage.ledger.report.tries % 6 == 5:
            # A slot that held a damaged block is out of use until a restart.
            stage.restart()
        stage.fill_durable()
        slab = SlabFile(stage.ssd_folder)
        keys = [key for chain in stage.journal.durable_chains() for key in chain.keys]
        slots = slab.find(keys, stage.block_bytes)
        damaged = self.damage(stage, slab, slots)
        stage.journal.excuse(damaged)
        if stage.rng.random() < 0.2:
            stage.restart()
        else:
            stage.empty_dram()

    def damage(self, stage: Stage, slab: SlabFile, slots: dict[BlockKey, int]) -> list[BlockKey]:
        """Damage some slots and return whose they are."""
        raise NotImplementedError

    def verify(self, stage: Stage) -> None:
        """Check every promise, and count the blocks that were refused."""
        before = stage.count_corrupt()
        stage.verify()
        stage.ledger.note_effect(self.effect, stage.count_corrupt() - before)


class SlabBitFlips(_SlabDamage):
    """See the description."""

    name = "slab_bit_flips"
    description = "random bits of stored payloads flipped in the slab file of a running store"

    def damage(self, stage: Stage, slab: SlabFile, slots: dict[BlockKey, int]) -> list[BlockKey]:
        """Flip one to three bits in up to four slots."""
        chosen = stage.rng.sample(sorted(slots), min(len(slots), stage.rng.randint(1, 4)))
        for key in chosen:
            # An odd number: flips of one bit cannot cancel each other out.
            slab.flip_bits(slots[key], stage.block_bytes, count=stage.rng.choice((1, 3)), rng=stage.rng)
        return chosen


class SlabForeignBlock(_SlabDamage):
    """See the description."""

    name = "slab_foreign_block"
    description = (
        "a whole, valid block copied over another's slot, or two slots exchanged, in a running store"
    )

    def damage(self, stage: Stage, slab: SlabFile, slots: dict[BlockKey, int]) -> list[BlockKey]:
        """Exchange two slots, or copy one over the other."""
        one, other = stage.rng.sample(sorted(slots), 2)
        if stage.rng.random() < 0.5:
            slab.swap(slots[one], slots[other], stage.block_bytes)
            return [one, other]
        slab.copy(slots[one], slots[other], stage.block_bytes)
        return [other]


class SlabTruncated(Fault):
    """See the description."""

    name = "slab_truncated"
    description = (
        "the slab file cut at a random place, in a running or a killed store, which then starts again"
    )
    effect = "blocks_cut_off"

    def inject(self, stage: Stage) -> None:
        """Cut it, look at what is left, and start again."""
        stage.fill_durable()
        slab = SlabFile(stage.ssd_folder)
        keys = [key for chain in stage.journal.durable_chains() for key in chain.keys]
        slots = slab.find_all(keys, stage.block_bytes)
        is_running = stage.rng.random() < 0.5
        if not is_running:
            stage.store.kill()
        end = max(map(max, slots.values()), default=0) + stage.block_bytes
        size = stage.rng.randrange(end)
        slab.truncate(size)
        # Bytes of a block may also lie where it was once, or where another kind put them.
        cut_off = [key for key, offsets in slots.items() if max(offsets) + stage.block_bytes > size]
        stage.ledger.note_effect(self.effect, len(cut_off))
        stage.journal.excuse(cut_off)
        if is_running:
            stage.empty_dram()
            for chain in stage.journal.durable_chains():
                stage.get(chain)
            stage.store.kill()
        stage.store.start()
        stage.drop_damaged()


class IndexBitFlips(Fault):
    """See the description."""

    name = "index_bit_flips"
    description = "random bits flipped in the index file of a killed store: at worst it starts empty"
    effect = "index_flips"

    def inject(self, stage: Stage) -> None:
        """Kill the store, flip up to 16 bits of its index, and start it."""
        stage.fill_durable()
        stage.store.kill()
        count = stage.rng.choice((1, 1, 2, 4, 16))
        flip_bits_in_used_pages(stage.ssd_folder / "index" / "data.mdb", count=count, rng=stage.rng)
        stage.ledger.note_effect(self.effect, count)
        stage.journal.excuse_all()
        stage.store.start()


class FolderDeleted(Fault):
    """See the description."""

    name = "folder_deleted"
    description = "the ssd folder deleted under a running store: the other tiers serve, a restart begins anew"

    def inject(self, stage: Stage) -> None:
        """Delete it under load, and restart the store."""
        with Load(stage):
            pause(stage.rng.uniform(0.0, 0.1))
            stage.journal.excuse_all()
            shutil.rmtree(stage.ssd_folder)
            pause(stage.rng.uniform(0.05, 0.2))
            stage.journal.excuse_all()
            stage.answers()
        stage.restart()
        stage.fill_durable()


class DiskWriteErrors(Fault):
    """See the description."""

    name = "disk_write_errors"
    description = "every write to a file fails for a while (file size limit 0): reads go on, durability heals"
    effect = "failed_writes"

    def inject(self, stage: Stage) -> None:
        """Make writes fail under load, and end that."""
        pid = stage.store.process.pid
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        with Load(stage):
            pause(stage.rng.uniform(0.0, 0.1))
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
            pause(stage.rng.uniform(0.1, 0.4))
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
            pause(stage.rng.uniform(0.0, 0.1))
        drops = stage.stats()["write_drops_blocks"]
        stage.ledger.note_effect(self.effect, sum(n for what, n in drops.items() if what.startswith("ssd/")))

    def verify(self, stage: Stage) -> None:
        """Check every promise, and that blocks become durable again."""
        stage.verify()
        stage.verify_becomes_durable()


def disk_faults() -> tuple[Fault, ...]:
    """Return one of each kind."""
    return (
        SlabBitFlips(),
        SlabForeignBlock(),
        SlabTruncated(),
        IndexBitFlips(),
        FolderDeleted(),
        DiskWriteErrors(),
    )
