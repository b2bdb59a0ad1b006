"""Faults of clients: killed, frozen or misbehaving while they hold leases and slots, and many at once."""

import os
import socket
import struct
import threading
from typing import ClassVar

import numpy as np

from kvstore.drill.client_part import ClientPart
from kvstore.drill.fault import Fault
from kvstore.drill.load import Load
from kvstore.drill.raw_client import RawClient
from kvstore.drill.stage import HEALTH_S, Stage, pause
from kvstore.drill.store_process import wait_until
from kvstore.link import unix_dial
from kvstore.messages import ChainRef, Hello, Match, Ping, Release, encode_message
from kvstore.wire import MAX_BODY_BYTES, VERSION


class ClientKilledWithLease(Fault):
    """See the description."""

    name = "client_killed_with_lease"
    description = "kill -9 of a client that holds leases: they end at once, the blocks may leave"

    def inject(self, stage: Stage) -> None:
        """Have a client lease a chain, kill it, and push its blocks out of dram."""
        chain = stage.new_chain(stage.rng.randint(1, 8))
        stage.put(chain)
        with ClientPart(stage, "lease", chain) as client:
            client.wait_ready()
            if stage.stats()["live_leases"] != 1:
                stage.ledger.note_violation(f"{stage.stats()['live_leases']} leases, one client holds one")
            client.kill()
        if not wait_until(lambda: stage.stats()["live_leases"] == 0, HEALTH_S):
            stage.ledger.note_violation("the lease of a killed client has not ended")
        stage.empty_dram()


class ClientKilledWhileWriting(Fault):
    """See the description."""

    name = "client_killed_while_writing"
    description = (
        "kill -9 of a client with half-written slots: never visible, another may put the same blocks"
    )

    def inject(self, stage: Stage) -> None:
        """Have a client write halves, kill it, and put the same chain."""
        chain = stage.new_chain(stage.rng.randint(1, 8))
        used = _dram_bytes(stage)
        with ClientPart(stage, "write", chain) as client:
            client.wait_ready()
            if stage.get(chain).blocks:
                stage.ledger.note_violation("a block is served before it was committed")
            client.kill()
        if not wait_until(lambda: _dram_bytes(stage) <= used, HEALTH_S):
            stage.ledger.note_violation("the slots of a killed client were not given back")
        if stage.put(chain).stored != len(chain) or stage.get(chain).blocks != len(chain):
            stage.ledger.note_violation("blocks that a killed client was writing cannot be put")
        stage.client.drop(chain)


class _FrozenClient(Fault):
    """A client frozen until its time is up."""

    lease_s: ClassVar[float] = 0.15

    def outlast(self, stage: Stage, client: ClientPart) -> None:
        """Freeze a client until everything it held has ended, and others have used its slots."""
        client.pause()
        if not wait_until(lambda: stage.stats()["lease_events"].get("expired", 0) > 0, 2.0):
            stage.ledger.note_violation("what a frozen client holds does not end at its deadline")
        pause(self.lease_s + 0.3)
        stage.empty_dram()
        with Load(stage, num_threads=1):
            pause(stage.rng.uniform(0.0, 0.05))
        for chain in stage.journal.durable_chains():
            stage.get(chain)
        client.resume()


class ReaderFrozenPastLease(_FrozenClient):
    """See the description."""

    name = "reader_frozen_past_lease"
    description = (
        "a client frozen while it holds a lease, its slots reused meanwhile, then thawed: it takes nothing"
    )

    def inject(self, stage: Stage) -> None:
        """Freeze a reader past its lease, and see what it accepts."""
        chain = stage.new_chain(stage.rng.randint(2, 8))
        stage.put(chain)
        with ClientPart(stage, "lease", chain) as client:
            client.wait_ready()
            self.outlast(stage, client)
            said = client.go_on()
            if said["wrong_bytes"]:
                stage.ledger.note_wrong("a thawed reader", int(str(said["wrong_bytes"])))
        stage.client.drop(chain)


class WriterFrozenPastLease(_FrozenClient):
    """See the description."""

    name = "writer_frozen_past_lease"
    description = (
        "a client frozen with lent slots past its time, then thawed: it stores nothing, nobody got its slots"
    )

    def inject(self, stage: Stage) -> None:
        """Freeze a writer past its time, and let it write and commit."""
        chain = stage.new_chain(stage.rng.randint(2, 8))
        with ClientPart(stage, "write", chain) as client:
            client.wait_ready()
            self.outlast(stage, client)
            said = client.go_on()
        if said["stored"]:
            stage.ledger.note_violation(f"a writer stored {said['stored']} blocks after its time")


class StaleWriterScribbles(_FrozenClient):
    """See the description."""

    name = "stale_writer_scribbles"
    description = (
        "a client that writes into and commits lent slots long after its time: nobody's block changes"
    )

    def inject(self, stage: Stage) -> None:
        """Freeze a writer past its time, and let it write anyway."""
        chain, before = stage.new_chain(stage.rng.randint(2, 8)), stage.count_corrupt()
        with ClientPart(stage, "scribble", chain) as client:
            client.wait_ready()
            self.outlast(stage, client)
            said = client.go_on()
        if said["stored"]:
            stage.ledger.note_violation(f"a writer stored {said['stored']} blocks after its time")
        for durable in stage.journal.durable_chains():
            stage.get(durable)
        stage.drop_damaged()
        stage.ledger.note_effect("blocks_refused", stage.count_corrupt() - before)


class SlotScribbled(Fault):
    """See the description."""

    name = "slot_scribbled"
    weight = 3.0
    description = (
        "a misbehaving client writes into arena slots of stored blocks: the blocks are misses or re-read"
    )
    effect = "slots_scribbled"

    def inject(self, stage: Stage) -> None:
        """Lease blocks, change bytes of their slots, and ask for them."""
        chain = stage.new_chain(stage.rng.randint(1, 8))
        stage.put(chain)
        if stage.rng.random() < 0.5:
            stage.client.flush()
        with RawClient(unix_dial(stage.store.socket_path), stage.namespace) as raw:
            ready = raw.lease(chain)
            for slot in ready.slots:
                target = np.frombuffer(raw.writing.slot(slot.offset, stage.block_bytes), np.uint8)
                start = stage.rng.randrange(stage.block_bytes)
                stop = min(stage.block_bytes, start + stage.rng.choice((1, 64, stage.block_bytes)))
                target[start:stop] ^= 1 << stage.rng.randrange(8)
            stage.ledger.note_effect(self.effect, len(ready.slots))
            if ready.lease is not None and stage.rng.random() < 0.5:
                raw.link.tell(Release(ready.lease))
            for _ in range(3):
                stage.get(chain)
        stage.put(chain)
        stage.get(chain)
        # What was scribbled on while it was written below is damaged there too.
        stage.client.flush()
        stage.drop_damaged()
        stage.client.drop(chain)


class MalformedFrames(Fault):
    """See the description."""

    name = "malformed_frames"
    weight = 3.0
    description = (
        "noise, cut, oversized and altered frames on the socket: those connections end, others do not"
    )
    effect = "connections_spoilt"

    def inject(self, stage: Stage) -> None:
        """Spoil some connections while others work."""
        with Load(stage, num_threads=1):
            for _ in range(12):
                self._spoil(stage)

    def _spoil(self, stage: Stage) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
            raw.settimeout(2.0)
            raw.connect(os.fspath(stage.store.socket_path))
            if stage.rng.random() < 0.7:
                raw.sendall(encode_message(Hello(os.getpid()), 0))
            try:
                for _ in range(stage.rng.randint(1, 4)):
                    raw.sendall(self._frame(stage))
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(65536):
                    pass
            except TimeoutError:
                stage.ledger.note_violation("a connection that sent rubbish is still open after 2 s")
            except OSError:
                stage.ledger.note_effect(self.effect, 1)
                return
        stage.ledger.note_effect(self.effect, 1)

    def _frame(self, stage: Stage) -> bytes:
        rng = stage.rng
        chain = stage.new_chain(rng.randint(1, 40))
        sound = rng.choice((encode_message(Match(ChainRef(chain, None), 1000), 7), encode_message(Ping(), 8)))
        dice = rng.random()
        if dice < 0.2:
            return rng.randbytes(rng.randint(1, 4096))
        if dice < 0.4:
            return sound[: rng.randrange(1, len(sound))]
        if dice < 0.5:
            return struct.pack(
                "<4sHHQI", b"KVSF", VERSION, rng.randrange(20), 9, rng.randint(MAX_BODY_BYTES, 2**32 - 1)
            )
        altered = bytearray(sound)
        for _ in range(rng.randint(1, 8)):
            altered[rng.randrange(len(altered))] = rng.randrange(256)
        return bytes(altered)


class WritersOfOneKey(Fault):
    """See the description."""

    name = "writers_of_one_key"
    weight = 3.0
    description = (
        "many clients put the same blocks at once while others read them: one whole value, or a miss"
    )

    def inject(self, stage: Stage) -> None:
        """Let eight clients write and read one chain."""
        chain = stage.new_chain(stage.rng.randint(1, 6))
        gate = threading.Barrier(8)

        def act(index: int) -> None:
            with stage.new_client() as client:
                gate.wait()
                for _ in range(3):
                    if index % 2:
                        stage.put(chain, client=client)
                    stage.get(chain, client=client)

        _run_all([threading.Thread(target=act, args=(index,)) for index in range(8)])
        if stage.get(chain).blocks != len(chain):
            stage.ledger.note_violation("a chain that four clients have put is not served")
        stage.client.drop(chain)


class ReadersOfColdBlock(Fault):
    """See the description."""

    name = "readers_of_cold_block"
    weight = 3.0
    description = (
        "thirty-two clients ask at once for blocks that are only on ssd: each is read from disk once"
    )
    effect = "blocks_read_from_disk"

    def inject(self, stage: Stage) -> None:
        """Push a chain out of dram and let all ask for it."""
        chain = stage.rng.choice(stage.fill_durable(8))
        stage.empty_dram()
        before, gate = self._read_blocks(stage), threading.Barrier(32)

        def act() -> None:
            with stage.new_client() as client:
                client.ping()
                gate.wait()
                stage.get(chain, client=client, timeout_s=2.0)

        _run_all([threading.Thread(target=act) for _ in range(32)])
        num_read = self._read_blocks(stage) - before
        stage.ledger.note_effect(self.effect, num_read)
        if num_read > len(chain):
            stage.ledger.note_violation(f"{len(chain)} cold blocks were read {num_read} times")

    def _read_blocks(self, stage: Stage) -> int:
        transfers = stage.stats()["transfers"]
        return int(transfers.get("ssd->dram", {}).get("blocks", 0))


class ForkInHost(Fault):
    """See the description."""

    name = "fork_in_host"
    description = "a process that uses a client forks, and both go on using it: no connection is shared"

    def inject(self, stage: Stage) -> None:
        """Let a client process fork under use."""
        chain = stage.new_chain(6)
        stage.put(chain[: stage.rng.randint(1, 6)])
        with ClientPart(stage, "fork", chain) as client:
            client.wait_ready()
            said = client.go_on()
        if said["wrong_bytes"]:
            stage.ledger.note_wrong("a forking client", int(str(said["wrong_bytes"])))
        if said["child_status"]:
            stage.ledger.note_violation(f"the forked child ended with status {said['child_status']}")
        stage.client.drop(chain)


def _dram_bytes(stage: Stage) -> int:
    return int(stage.stats()["tiers"]["dram"]["used_bytes"])


def _run_all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def client_faults() -> tuple[Fault, ...]:
    """Return one of each kind."""
    return (
        ClientKilledWithLease(),
        ClientKilledWhileWriting(),
        SlotScribbled(),
        MalformedFrames(),
        WritersOfOneKey(),
        ReadersOfColdBlock(),
        ForkInHost(),
        ReaderFrozenPastLease(),
        WriterFrozenPastLease(),
        StaleWriterScribbles(),
    )
