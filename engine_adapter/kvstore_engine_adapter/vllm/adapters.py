"""AdapterGroups: the groups' identities with a LoRA adapter, once the adapter's files have been hashed.

vLLM's block hash has an adapter's name and path only, and another replica may have other weights there. So
its files decide: every byte of them, hashed in a thread. Until that is done, requests with it share nothing.
Files that have changed since the engine started are refused, for vLLM may have loaded what they were before;
and so is a path from which an adapter was loaded again in place.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvstore.errors import KVStoreError
from kvstore.keys import Namespace
from kvstore_engine_adapter.model_digest import ModelFiles
from kvstore_engine_adapter.vllm.identity import GroupIdentity

logger = logging.getLogger(__name__)

_SUFFIXES = (".safetensors", ".bin", ".pt", ".json")
_MAX_ADAPTERS = 1024

Groups = tuple[GroupIdentity, ...]


class AdapterGroups:
    """The identities of an engine's groups for each adapter that its requests name."""

    def __init__(
        self,
        groups: Groups,
        open_namespace: Callable[[Namespace], object],
        *,
        wall_clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._started_ns = wall_clock_ns()
        self._groups = groups
        self._open_namespace = open_namespace
        self._known: dict[str, Groups | None] = {}
        self._reloaded: set[str] = set()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvstore-adapter")

    def groups(self, lora_request: Any) -> Groups | None:
        """Return the groups with that adapter, vLLM's ``LoRARequest``; None: not known, so share nothing.

        Does not wait: the first request with an adapter begins the hashing, later ones find it done.
        """
        path = str(getattr(lora_request, "lora_path", "") or "")
        with self._lock:
            if getattr(lora_request, "load_inplace", False):
                self._reloaded.add(path)
                self._known[path] = None
            if path in self._known or len(self._known) >= _MAX_ADAPTERS:
                return self._known.get(path)
            self._known[path] = None
        self._thread.submit(self._learn, path)
        return None

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _learn(self, path: str) -> None:
        try:
            folder = Path(path)
            files = sorted(file for file in folder.iterdir() if file.suffix in _SUFFIXES)
            digest = ModelFiles(files).digest() if path and files else ""
            if any(file.stat().st_ctime_ns >= self._started_ns for file in files):
                digest = ""
        except (OSError, KVStoreError) as error:
            logger.warning("adapter %s: requests with it share nothing: %s", path, error)
            return
        if not digest:
            logger.warning(
                "adapter %s: requests with it share nothing: no files there, or they have changed since this "
                "engine started",
                path,
            )
            return
        groups = tuple(
            replace(group, namespace=replace(group.namespace, adapter=digest)) for group in self._groups
        )
        for group in groups:
            self._open_namespace(group.namespace)
        with self._lock:
            if path not in self._reloaded:
                self._known[path] = groups
