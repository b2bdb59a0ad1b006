"""A real store in a process of its own, for tests that kill, stop and restart it."""

from pathlib import Path

from kvstore.drill import store_process
from kvstore.drill.store_process import StoreSettings

MIB = 1 << 20


class StoreProcess(store_process.StoreProcess):
    """``kvstore serve`` with a small dram tier and nothing below it, on a socket in ``folder``."""

    def __init__(
        self,
        folder: Path,
        *,
        dram_bytes: int = 16 * MIB,
        lease_s: float = 30.0,
        http_port: int = 0,
        http_more: str = "",
        max_connections: int = 256,
        policy: str = "",
    ) -> None:
        settings = StoreSettings(
            dram_bytes=dram_bytes,
            lease_s=lease_s,
            http_port=http_port,
            http_more=http_more,
            max_connections=max_connections,
            policy=policy,
        )
        super().__init__(folder, settings)

    @property
    def url(self) -> str:
        """Where it speaks HTTP."""
        return f"http://127.0.0.1:{self.settings.http_port}"
