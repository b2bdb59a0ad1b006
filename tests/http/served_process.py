"""``kvstore serve`` with an HTTP face, in a process of its own."""

import re
from dataclasses import dataclass

from kvstore.drill import store_process
from kvstore.drill.store_process import MIB, StoreSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings(StoreSettings):
    """A store's settings, and lines of its ``[http]`` section."""

    http: str = ""

    def toml(self, socket_path):
        text = StoreSettings.toml(self, socket_path)
        return f'{text}[http]\nlisten = "127.0.0.1:0"\n{self.http}\n'


class ServedProcess(store_process.StoreProcess):
    """Once started, ``url`` is where its face is."""

    def __init__(self, folder, *, http="", dram_bytes=64 * MIB):
        super().__init__(folder, HttpSettings(dram_bytes=dram_bytes, http=http))

    @property
    def log(self):
        return (self.folder / "store.log").read_text(encoding="utf-8", errors="replace")

    @property
    def url(self):
        return re.findall(r"http: listening on (\S+)", self.log)[-1]
