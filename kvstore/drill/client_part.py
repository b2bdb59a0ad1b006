"""ClientPart: the drill's end of a client in a process of its own."""

from kvstore.drill.child_part import ChildPart
from kvstore.drill.stage import Stage
from kvstore.keys import PrefixChain


class ClientPart(ChildPart):
    """One client process; see ``client_process`` for the roles. A context that ends it."""

    def __init__(self, stage: Stage, role: str, chain: PrefixChain) -> None:
        order = {
            "role": role,
            "socket": str(stage.store.socket_path),
            "namespace": stage.namespace.model,
            "block_bytes": stage.block_bytes,
            "keys": [key.hex() for key in chain.keys],
        }
        super().__init__("client_process", order, log=stage.folder / "clients.log")

    def wait_ready(self) -> int:
        """Wait until it holds what its role holds; returns of how many blocks. Raises PartFailed."""
        return int(str(self.hear("ready")["blocks"]))

    def go_on(self) -> dict[str, object]:
        """Let it go on; returns what came of it. Raises PartFailed."""
        self.tell("go")
        return self.hear("done")
