"""What SGLang's scenarios share: replicas of SGLang, and references without a storage backend."""

from pathlib import Path

from tests.engines.scenario import Workshop
from tests.engines.sglang_process import LONG_MS, SglangReplica, sglang_python

ENGINE = "sglang"
PAGE = 32
SHARED = 288
"""Tokens of the full pages of a prompt of 300."""

LONG: dict[str, object] = {
    "lookup_deadline_ms": LONG_MS,
    "load_deadline_ms": LONG_MS,
    "save_deadline_ms": LONG_MS,
}
"""Deadlines for scenarios that demand hits."""


class SglangWorkshop(Workshop):
    """A folder with models and logs, and the answers of SGLang without a storage backend."""

    def python(self) -> Path:
        """Return SGLang's own Python."""
        return sglang_python()

    def replica(self, name: str, *, model: Path | None = None, **arguments: object) -> SglangReplica:  # type: ignore[override]  # what scenarios use of it is the same
        """Return an engine that is not started."""
        return SglangReplica(model or self.model(), self.log(name), **arguments)  # type: ignore[arg-type]
