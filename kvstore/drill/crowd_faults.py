"""Faults of many clients at once."""

from kvstore.drill.child_part import ChildPart
from kvstore.drill.fault import Fault
from kvstore.drill.stage import HEAL_S, HEALTH_S, Stage
from kvstore.drill.store_process import wait_until
from kvstore.keys import PrefixChain

_EACH = 4


class CrowdKilled(Fault):
    """See the description."""

    name = "crowd_killed"
    description = (
        "kill -9 of twelve clients at once: some hold leases, some half-written slots, some are in calls"
    )
    effect = "clients_killed"

    def inject(self, stage: Stage) -> None:
        """Let the clients hold and work, kill them together, and put what they were writing."""
        used = _used_bytes(stage)
        leased, written, worked = (
            [stage.new_chain(stage.rng.randint(1, 2)) for _ in range(_EACH)] for _ in range(3)
        )
        for chain in leased:
            stage.put(chain, timeout_s=HEAL_S)
        members = [("lease", leased), ("write", written), ("work", worked)]
        with ChildPart("crowd_process", _order(stage, members), log=stage.folder / "clients.log") as crowd:
            num_clients = int(str(crowd.hear("ready")["clients"]))
            self._look(stage, written)
            self._judge(stage, crowd.hear_within(stage.rng.uniform(0.0, 0.2)))
            crowd.kill_all()
        stage.ledger.note_effect(self.effect, num_clients)
        if not wait_until(lambda: stage.stats()["live_leases"] == 0, HEALTH_S):
            stage.ledger.note_violation("leases of killed clients have not ended")
        for chain in written:
            stored = stage.put(chain, timeout_s=HEAL_S).stored
            if stored != len(chain) or stage.get(chain, timeout_s=HEAL_S).blocks != len(chain):
                stage.ledger.note_violation("blocks that a killed client was writing cannot be put")
        for chain in (*leased, *written, *worked):
            stage.get(chain)
            stage.client.drop(chain)
        if not wait_until(lambda: _used_bytes(stage) <= used, HEALTH_S):
            stage.ledger.note_violation("slots of killed clients were not given back")

    def _look(self, stage: Stage, written: list[PrefixChain]) -> None:
        for chain in written:
            if stage.get(chain).blocks:
                stage.ledger.note_violation("a block is served before it was committed")
        leases = stage.stats()["live_leases"]
        if leases < _EACH:
            stage.ledger.note_violation(f"{leases} leases, {_EACH} clients hold one each")

    def _judge(self, stage: Stage, said: dict[str, object] | None) -> None:
        """Judge what a client said that ended by itself."""
        if said is None:
            return
        if said["was_served_wrong_bytes"]:
            stage.ledger.note_wrong("a client of the crowd", 1)
        else:
            stage.ledger.note_violation(f"a client of the crowd ended with status {said['status']}")


def _order(stage: Stage, members: list[tuple[str, list[PrefixChain]]]) -> dict[str, object]:
    return {
        "socket": str(stage.store.socket_path),
        "namespace": stage.namespace.model,
        "block_bytes": stage.block_bytes,
        "members": [
            (role, [key.hex() for key in chain.keys]) for role, chains in members for chain in chains
        ],
    }


def _used_bytes(stage: Stage) -> int:
    return int(stage.stats()["tiers"]["dram"]["used_bytes"])


def crowd_faults() -> tuple[Fault, ...]:
    """Return one of each kind."""
    return (CrowdKilled(),)
