"""CallWatch: how long an engine is in calls of its connector, and how long requests wait for lookups."""

import functools
import time
from collections.abc import Callable
from typing import Any

_LOOKUP = "get_num_new_matched_tokens"
_CALLS = (
    _LOOKUP,
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "build_connector_worker_meta",
    "take_events",
)


class CallWatch:
    """Times the calls of a connector's class, for engines with one request at a time in one process."""

    def __init__(self, connector: type) -> None:
        self._calls_s: dict[str, float] = {}
        self._asked_s: dict[str, float] = {}
        self._waits_s: list[float] = []
        self._is_inside = False
        for name in _CALLS:
            setattr(connector, name, self._timed(name, getattr(connector, name)))

    def take(self) -> dict[str, Any]:
        """Return seconds by call, and the wait of each request from its first question to its answer."""
        taken = {"calls_s": self._calls_s, "waits_s": self._waits_s}
        self._calls_s, self._waits_s = {}, []
        return taken

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*given: Any, **named: Any) -> Any:
            if self._is_inside:
                return call(*given, **named)
            self._is_inside = True
            began_s = time.perf_counter()
            try:
                result = call(*given, **named)
            finally:
                self._is_inside = False
                ended_s = time.perf_counter()
                self._calls_s[name] = self._calls_s.get(name, 0.0) + ended_s - began_s
            if name == _LOOKUP:
                self._note_lookup(given[1].request_id, began_s, ended_s, is_known=result[0] is not None)
            return result

        return timed

    def _note_lookup(self, request_id: str, began_s: float, ended_s: float, *, is_known: bool) -> None:
        first_s = self._asked_s.setdefault(request_id, began_s)
        if is_known:
            self._waits_s.append(ended_s - first_s)
            del self._asked_s[request_id]
