"""One node's store as the demo sees it: a ``kvstore serve`` process, its configuration and its client."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from kvstore.client import KVStore
from kvstore.config_values import size_text
from kvstore.errors import KVStoreError
from kvstore_engine_adapter.demo.processes import Child, DemoFailed, Processes, kvstore_command

DRAM_BYTES = 256 << 20
SSD_BYTES = 256 << 20
_START_S = 30.0
_FLUSH_S = 60.0
_POLL_S = 0.1
_MAX_POLLS = 300
_STEADY_POLLS = 8


@dataclass(slots=True)
class StoreNode:
    """A store: where it keeps things, and the process that serves them now."""

    name: str
    folder: Path
    redis_url: str
    has_ssd: bool
    child: Child | None = None

    @property
    def address(self) -> str:
        """Address for clients."""
        return f"unix:{self.folder / 'store.sock'}"

    @property
    def config_text(self) -> str:
        """Its configuration file.

        The deadlines are longer than the defaults: the demo shares two cores with everything it started.
        """
        lines = [
            "[server]",
            f'socket = "{self.folder / "store.sock"}"',
            "[store]",
            "timeout_s = 0.5",
            "[tiers.dram]",
            f'capacity_bytes = "{size_text(DRAM_BYTES)}"',
        ]
        if self.has_ssd:
            lines += [
                "[tiers.ssd]",
                f'path = "{self.folder / "ssd"}"',
                f'capacity_bytes = "{size_text(SSD_BYTES)}"',
            ]
        lines += ["[tiers.remote]", f'url = "{self.redis_url}"', "timeout_s = 0.25"]
        return "\n".join(lines) + "\n"

    async def start(self, processes: Processes) -> None:
        """Start the server, again on the same folder if it ran before.

        Raises:
            DemoFailed: it does not start.
        """
        path = self.folder / "kvstore.toml"
        await asyncio.to_thread(path.write_text, self.config_text, encoding="utf-8")
        self.child = await processes.start(
            self.name, kvstore_command("serve", "--config", str(path), "--json")
        )
        await processes.ready_event(self.child, timeout_s=_START_S)

    async def settle(self) -> None:
        """Wait until engines have handed over what they computed, and all of it is in the slower tiers.

        Raises:
            DemoFailed: the server does not answer, or does not come to rest.
        """
        try:
            await self._steady_blocks()
            await asyncio.to_thread(self._flush)
        except KVStoreError as error:
            raise DemoFailed(f"{self.name}: {error}") from error

    async def _steady_blocks(self) -> None:
        """Wait until there are blocks in dram and their number has not changed for a while."""
        seen, steady = 0, 0
        with KVStore.connect(self.address) as store:
            for _ in range(_MAX_POLLS):
                stats = await asyncio.to_thread(store.stats)
                blocks = int(stats["tiers"]["dram"]["blocks"])
                steady = steady + 1 if blocks == seen and blocks > 0 else 0
                if steady == _STEADY_POLLS:
                    return
                seen = blocks
                await asyncio.sleep(_POLL_S)
        raise DemoFailed(
            f"{self.name}: {seen} blocks in dram after {_MAX_POLLS * _POLL_S:.0f} s,"
            " expected those of replica A, all of them"
        )

    def _flush(self) -> None:
        with KVStore.connect(self.address) as store:
            if not store.flush(timeout_s=_FLUSH_S):
                raise DemoFailed(f"{self.name}: blocks are not written through after {_FLUSH_S:.0f} s")
