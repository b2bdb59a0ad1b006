"""SglangReplica: an SGLang engine in a process of its own, as a test sees it."""

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.engines.replica_process import ENVIRON, ROOT, ReplicaProcess

LONG_MS = 20_000
"""Deadlines for scenarios that demand hits: the machine may be busy."""


def sglang_python() -> Path:
    """Return SGLang's own Python."""
    return Path(os.environ.get("KVSTORE_SGLANG_VENV", ROOT / ".venv-engines-sglang")) / "bin" / "python"


def storage(store: str, *, interface_v1: bool = True, **options: object) -> dict[str, object]:
    """Return SGLang's arguments for this backend."""
    extra = {
        "backend_name": "kvstore",
        "module_path": "kvstore_engine_adapter.sglang",
        "class_name": "KVStoreBackend",
        "interface_v1": int(interface_v1),
        "prefetch_threshold": 32,
        "hicache_storage_pass_prefix_keys": True,
        "kvstore": {"store": store, **options},
    }
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "page_first_direct",
        "hicache_write_policy": "write_through",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(extra),
    }


class SglangReplica(ReplicaProcess):
    """An engine that is started when it is entered; its log goes to ``log``."""

    def __init__(
        self, model: Path, log: Path, *, environ: Mapping[str, str] | None = None, **arguments: object
    ) -> None:
        self.log = log
        self._arguments: dict[str, Any] = {
            "model_path": str(model),
            "device": "cpu",
            "dtype": "float32",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "disable_overlap_schedule": True,
            "disable_cuda_graph": True,
            "skip_tokenizer_init": True,
            "page_size": 32,
            "max_total_tokens": 8192,
            "log_level": "info",
            **arguments,
        }
        self._begin_as(
            {
                **os.environ,
                **ENVIRON,
                "SGLANG_USE_CPU_ENGINE": "1",
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "engine_adapter")]),
                **(environ or {}),
            }
        )

    def command(self) -> list[str]:
        """Return what runs the engine."""
        return [str(sglang_python()), str(Path(__file__).with_name("sglang_replica.py"))]

    def __exit__(self, *given: object) -> None:
        super().__exit__(*given)
        assert self._process is not None
        try:
            # SGLang's processes are of its session, and may outlive it.
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
