"""Faults of a process that has a store of its own inside."""

import shutil

from kvstore.drill.child_part import ChildPart
from kvstore.drill.fault import Fault
from kvstore.drill.stage import Stage
from kvstore.drill.store_process import MIB, StoreSettings


class ForkOverLocalStore(Fault):
    """See the description."""

    name = "fork_over_local_store"
    description = (
        "a process with a store of its own forks under use, is killed, and starts again beside its child"
    )

    def inject(self, stage: Stage) -> None:
        """Let a host fork, kill it, and open its store again while its child lives."""
        folder = stage.folder / "local"
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()
        settings = StoreSettings(dram_bytes=2 * MIB, ssd_bytes=16 * MIB, ssd_folder=folder / "ssd")
        config = folder / "store.toml"
        config.write_text(settings.toml(folder / "kv.sock"), encoding="utf-8")
        order = {"config": str(config), "seed": stage.rng.getrandbits(32)}
        log = stage.folder / "local.log"
        with ChildPart("local_process", {**order, "role": "fork"}, log=log) as first:
            self._judge(stage, first.hear("done"))
            first.kill()
            with ChildPart("local_process", {**order, "role": "look"}, log=log) as second:
                self._judge(stage, second.hear("done"))

    def _judge(self, stage: Stage, said: dict[str, object]) -> None:
        if said["wrong_bytes"]:
            stage.ledger.note_wrong("a process that forks", int(str(said["wrong_bytes"])))
        problems = said["problems"]
        assert isinstance(problems, list), "problems are a list of lines"
        for line in problems:
            stage.ledger.note_violation(str(line))


def local_faults() -> tuple[Fault, ...]:
    """Return one of each kind."""
    return (ForkOverLocalStore(),)
