"""Faults of the store's process: killed, ended, frozen."""

from kvstore.drill.fault import Fault
from kvstore.drill.load import Load
from kvstore.drill.stage import Stage, pause


class KillUnderLoad(Fault):
    """See the description."""

    name = "kill_under_load"
    description = "kill -9 of the store at a random moment while clients put, get and wait for durability"

    def inject(self, stage: Stage) -> None:
        """Kill it within a quarter of a second, start it again, and go on for a moment."""
        with Load(stage):
            pause(stage.rng.uniform(0.0, 0.25))
            stage.store.kill()
            stage.store.start()
            pause(stage.rng.uniform(0.0, 0.05))


class KillDuringStart(Fault):
    """See the description."""

    name = "kill_during_start"
    description = "kill -9 of the store at a random moment of its restart after a kill -9"

    def inject(self, stage: Stage) -> None:
        """Kill it, start it, kill it before it is ready or just after, and start it again."""
        stage.store.kill()
        for _ in range(stage.rng.randint(1, 2)):
            stage.store.launch()
            pause(stage.rng.uniform(0.0, 0.6))
            stage.store.kill()
        stage.store.start()


class TerminateUnderLoad(Fault):
    """See the description."""

    name = "terminate_under_load"
    description = "SIGTERM under load: the store finishes what is under way and ends with status 0"

    def inject(self, stage: Stage) -> None:
        """End it under load and start it again."""
        with Load(stage):
            pause(stage.rng.uniform(0.0, 0.2))
            status = stage.store.terminate()
            if status:
                stage.ledger.note_violation(f"the store ended with status {status} on SIGTERM")
            stage.store.start()


class FreezeServer(Fault):
    """See the description."""

    name = "freeze_store"
    description = "SIGSTOP of the store under load: every call of a client ends by its deadline"

    def inject(self, stage: Stage) -> None:
        """Freeze it for up to 0.6 s."""
        with Load(stage, acknowledges=False):
            pause(stage.rng.uniform(0.0, 0.1))
            stage.store.pause()
            try:
                pause(stage.rng.uniform(0.05, 0.6))
            finally:
                stage.store.resume()


def process_faults() -> tuple[Fault, ...]:
    """Return one of each kind."""
    return (
        KillUnderLoad(),
        KillDuringStart(),
        TerminateUnderLoad(),
        FreezeServer(),
    )
