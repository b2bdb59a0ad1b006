"""Faults of the machine and its operator: full and read-only disks, limits, wrong configurations."""

import contextlib
import os
import resource
import socket
from dataclasses import replace
from pathlib import Path

from kvstore.drill.blocks import drill_namespace
from kvstore.drill.fault import Fault
from kvstore.drill.load import Load
from kvstore.drill.mounted_disk import MountedDisk, mount_obstacle
from kvstore.drill.stage import Stage, pause
from kvstore.drill.store_process import MIB, StoreProcess, StoreSettings
from kvstore.keys import PrefixChain
from kvstore.layout import KVLayout

_EXIT_USAGE = 2
_TIB = 1 << 40


def expect_refusal(stage: Stage, store: StoreProcess, *, prefix: tuple[str, ...] = (), says: str) -> None:
    """Start a store that must refuse to start, with status 2 and a message that names the matter."""
    store.launch(prefix=prefix)
    status = store.wait_ready()
    if status is None:
        store.kill()
    if status != _EXIT_USAGE or says not in store.last_words():
        stage.ledger.note_violation(f"a start that must be refused: status {status}: {store.last_words()}")


class _MountedDiskFault(Fault):
    """A store whose ssd folder lies on a small disk of its own."""

    shares_stage = False

    def __init__(self) -> None:
        self._disk: MountedDisk | None = None

    @property
    def disk(self) -> MountedDisk:
        """The disk."""
        assert self._disk is not None, "setup mounts the disk"
        return self._disk

    def obstacle(self) -> str:
        """Return why there can be no such disk."""
        return mount_obstacle()

    def setup(self, stage: Stage) -> None:
        """Mount the disk, and start the store on it."""
        self._disk = MountedDisk(stage.folder / "disk", 48 * MIB)
        stage.store.settings = replace(stage.store.settings, ssd_folder=self._disk.folder / "ssd")
        stage.store.start(prefix=self._disk.prefix)
        stage.fill_durable()
        stage.verify()

    def teardown(self, stage: Stage) -> None:
        """End the store and let the disk go."""
        stage.store.kill()
        if self._disk is not None:
            self._disk.close()
            self._disk = None


class DiskFull(_MountedDiskFault):
    """See the description."""

    name = "disk_full"
    description = "others fill the disk: the store goes on in its preallocated space, also after kill -9"

    def inject(self, stage: Stage) -> None:
        """Fill the disk, go on, kill the store, and start it on the full disk."""
        self.disk.fill_up(spare_bytes=stage.rng.choice((0, 0, 4096, MIB)))
        try:
            with Load(stage):
                pause(stage.rng.uniform(0.0, 0.1))
            stage.fill_durable(8)
            stage.store.kill()
            stage.store.launch(prefix=self.disk.prefix)
            status = stage.store.wait_ready()
            if status is None:
                stage.verify_durable()
                return
            if status != _EXIT_USAGE:
                stage.ledger.note_violation(f"on a full disk the start ended with status {status}")
        finally:
            self.disk.empty()
        stage.store.start(prefix=self.disk.prefix)


class DiskTooSmall(_MountedDiskFault):
    """See the description."""

    name = "disk_too_small"
    description = "a start with more capacity than the disk has is refused, and changes nothing there"

    def inject(self, stage: Stage) -> None:
        """Ask for too much, then start as before."""
        stage.store.kill()
        settings = stage.store.settings
        stage.store.settings = replace(settings, ssd_bytes=stage.rng.randint(48, 4096) * MIB)
        expect_refusal(stage, stage.store, prefix=tuple(self.disk.prefix), says="No space left")
        stage.store.settings = settings
        stage.store.start(prefix=self.disk.prefix)


class DiskReadOnly(_MountedDiskFault):
    """See the description."""

    name = "disk_read_only"
    description = "the disk is read-only at a start: refused with a message; writable again, all is there"

    def inject(self, stage: Stage) -> None:
        """Restart on a read-only disk, then on a writable one."""
        if stage.rng.random() < 0.5:
            stage.store.kill()
        else:
            stage.store.terminate()
        self.disk.make_read_only()
        expect_refusal(stage, stage.store, prefix=tuple(self.disk.prefix), says="Read-only file system")
        self.disk.make_writable()
        stage.store.start(prefix=self.disk.prefix)


class TwoDaemons(Fault):
    """See the description."""

    name = "two_daemons"
    description = "a second store on the same folder, or the same socket, is refused; the first goes on"

    def inject(self, stage: Stage) -> None:
        """Start a second store under load."""
        with Load(stage, num_threads=1):
            if stage.rng.random() < 0.5:
                folder = stage.folder / "second"
                folder.mkdir(exist_ok=True)
                second, says = StoreProcess(folder, stage.store.settings), str(stage.store.process.pid)
            else:
                second, says = _same_socket(stage), "another server answers"
            expect_refusal(stage, second, says=says)


def _same_socket(stage: Stage) -> StoreProcess:
    folder = stage.folder / "third"
    folder.mkdir(exist_ok=True)
    second = StoreProcess(folder, replace(stage.store.settings, ssd_folder=folder / "ssd"))
    second.socket_path = stage.store.socket_path
    return second


class RestartWithOtherConfig(Fault):
    """See the description."""

    name = "restart_other_config"
    description = "restarts with other capacities: more keeps everything, less keeps what fits"
    shares_stage = False

    def inject(self, stage: Stage) -> None:
        """Restart with other sizes."""
        old = stage.store.settings
        new = replace(
            old,
            dram_bytes=stage.rng.choice((2, 3, 8)) * MIB,
            staging_bytes=stage.rng.choice((1, 2)) * MIB,
            ssd_bytes=stage.rng.choice((4, 8, 16, 24)) * MIB,
        )
        if new.ssd_bytes < old.ssd_bytes:
            stage.journal.excuse_all()
        stage.store.settings = new
        if stage.rng.random() < 0.5:
            stage.store.kill()
            stage.store.start()
        else:
            stage.restart()
        if new.ssd_bytes >= old.ssd_bytes:
            stage.verify_durable()
        stage.fill_durable(12)


class OtherNamespace(Fault):
    """See the description."""

    name = "other_namespace"
    description = "the same tokens under another model, layout, epoch, adapter or salt never meet"
    weight = 3.0

    def inject(self, stage: Stage) -> None:
        """Ask for stored tokens under other names, and for stored keys under a foreign namespace."""
        tokens = [stage.rng.getrandbits(32) for _ in range(4 * 6)]
        chain = stage.namespace.chain(tokens)
        if not stage.put_durable(chain):
            stage.ledger.note_violation("a store without a fault did not make blocks durable")
        if stage.rng.random() < 0.3:
            stage.restart()
        base = stage.namespace
        others = (
            replace(base, model="drill "),
            replace(base, epoch=1),
            replace(base, adapter="drill"),
            replace(base, tenant_salt=b"drill"),
            drill_namespace(block_bytes=stage.block_bytes // 2),
            replace(base, layout=KVLayout.opaque(block_bytes=stage.block_bytes, block_tokens=2)),
        )
        for other in others:
            stage.client.open_namespace(other)
            planted = PrefixChain(other.digest, chain.keys, other.layout.block_tokens)
            for asked in (other.chain(tokens), planted):
                if stage.match(asked) or stage.client.get(asked):
                    stage.ledger.note_wrong("a block of another namespace", other.layout.block_bytes)
        stage.get(chain)


class DescriptorLimit(Fault):
    """See the description."""

    name = "descriptor_limit"
    description = "connections use up the store's file descriptors: it answers again once they end"
    weight = 3.0
    effect = "connections_held"

    def inject(self, stage: Stage) -> None:
        """Leave the store few descriptors, and connect many times."""
        pid = stage.store.process.pid
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        in_use = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 (names only)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (in_use + stage.rng.randint(0, 6), hard))
        held: list[socket.socket] = []
        try:
            for _ in range(stage.rng.randint(20, 60)):
                held.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                held[-1].settimeout(0.5)
                # Once nobody accepts, the queue of connections fills up too.
                with contextlib.suppress(BlockingIOError, TimeoutError):
                    held[-1].connect(os.fspath(stage.store.socket_path))
            with Load(stage):
                pause(stage.rng.uniform(0.0, 0.2))
            stage.get(stage.new_chain(2))
        finally:
            for connection in held:
                connection.close()
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
        stage.ledger.note_effect(self.effect, len(held))


class MemoryLimit(Fault):
    """See the description."""

    name = "memory_limit"
    description = "no more address space for a running store: it refuses or serves, and goes on after"

    def inject(self, stage: Stage) -> None:
        """Limit the store's address space under load."""
        pid = stage.store.process.pid
        soft, hard = resource.prlimit(pid, resource.RLIMIT_AS)
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[0])
        in_use = pages * resource.getpagesize()
        resource.prlimit(pid, resource.RLIMIT_AS, (in_use + stage.rng.choice((0, 256 << 10, 4 * MIB)), hard))
        try:
            with Load(stage, num_threads=3):
                pause(stage.rng.uniform(0.05, 0.25))
        finally:
            resource.prlimit(pid, resource.RLIMIT_AS, (soft, hard))
        if not stage.store.is_running:
            stage.ledger.note_violation(f"the store died: {stage.store.last_words()}")
            stage.store.kill()
            stage.store.start()


class ArenaTooBig(Fault):
    """See the description."""

    name = "arena_too_big"
    description = "a start with more dram than the machine or its limits have is refused with the amount"

    def inject(self, stage: Stage) -> None:
        """Ask for terabytes, or for more than the limit on address space."""
        folder = stage.folder / "big"
        folder.mkdir(exist_ok=True)
        settings = StoreSettings(dram_bytes=stage.rng.randint(8, 60) * _TIB)
        prefix: tuple[str, ...] = ()
        if stage.rng.random() < 0.5:
            settings = StoreSettings(dram_bytes=8192 * MIB)
            prefix = ("sh", "-c", 'ulimit -v 4000000; exec "$@"', "sh")
        expect_refusal(stage, StoreProcess(folder, settings), prefix=prefix, says="dram")


def host_faults() -> tuple[Fault, ...]:
    """Return one of each kind."""
    return (
        TwoDaemons(),
        OtherNamespace(),
        DescriptorLimit(),
        MemoryLimit(),
        ArenaTooBig(),
        RestartWithOtherConfig(),
        DiskFull(),
        DiskTooSmall(),
        DiskReadOnly(),
    )
