"""``/v1/models``, ``/healthz`` and ``/stats``: what is served, and how it does."""

from aiohttp import web

from kvstore_engine_adapter.faces.service import Service

_COUNTERS = (
    "connections",
    "open_connections",
    "refused_connections",
    "ended_newcomers",
    "failed_handshakes",
    "slow_clients",
    "malformed_requests",
    "requests",
    "errors",
)


class ModelRoutes:
    """Tells of the engine and its model."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def show_all(self, _request: web.Request) -> web.Response:
        """Answer with the one model."""
        return web.json_response({"object": "list", "data": [self._model()]})

    async def show(self, request: web.Request) -> web.Response:
        """Answer with the model if it is the one named."""
        self._service.require_model(request.match_info["name"])
        return web.json_response(self._model())

    async def health(self, _request: web.Request) -> web.Response:
        """Answer that it runs."""
        return web.json_response({"status": "ok"})

    async def stats(self, _request: web.Request) -> web.Response:
        """Answer with the engine's counters, and what HTTP has seen."""
        service = self._service
        counters = service.counters.as_dict()
        http = {name: counters[name] for name in _COUNTERS}
        http["unstored_responses"] = service.num_unstored_responses
        return web.json_response(service.engine.stats() | {"http": http})

    def _model(self) -> dict[str, object]:
        service = self._service
        return {
            "id": service.model_name,
            "object": "model",
            "created": service.created_s,
            "owned_by": "kvstore",
            "max_model_len": service.engine.context_tokens,
        }
