"""``/v1/sessions``: make, list, show, fork and delete sessions. Chats continue them."""

from aiohttp import web

from kvstore_engine_adapter.faces.api_error import ApiError
from kvstore_engine_adapter.faces.callers import owner_of
from kvstore_engine_adapter.faces.chat_request import read_messages
from kvstore_engine_adapter.faces.fields import Fields, json_object
from kvstore_engine_adapter.faces.parameters import FORK, SESSION
from kvstore_engine_adapter.faces.service import Service, read_request_body
from kvstore_engine_adapter.faces.sessions import SessionHead, Sessions
from kvstore_engine_adapter.tokenizer import ChatMessage

_MAX_LISTED = 1000
_DEFAULT_LISTED = 100


class SessionRoutes:
    """Answers about sessions."""

    def __init__(self, service: Service, sessions: Sessions) -> None:
        self._service = service
        self._sessions = sessions

    async def create(self, request: web.Request) -> web.Response:
        """Make a session."""
        fields = Fields(json_object(await read_request_body(request) or b"{}"))
        fields.require_known(SESSION)
        messages = read_messages(fields) if fields.has("messages") else ()
        head = await self._sessions.create(owner_of(request), fields.optional_text("name"), messages)
        return web.json_response(session_json(head), status=201)

    async def show_all(self, request: web.Request) -> web.Response:
        """List the caller's sessions by name."""
        limit = _listed(request.query.get("limit"))
        after = request.query.get("after", "")
        found = await self._sessions.page(owner_of(request), after=after, limit=limit)
        return web.json_response({"object": "list", "data": found, "has_more": len(found) == limit})

    async def show(self, request: web.Request) -> web.Response:
        """Show a session with its history."""
        head, turns = await self._sessions.history(owner_of(request), request.match_info["name"])
        messages = [_message_json(message) for turn in turns for message in turn]
        return web.json_response({**session_json(head), "messages": messages})

    async def fork(self, request: web.Request) -> web.Response:
        """Make a session that has the history of another."""
        fields = Fields(json_object(await read_request_body(request) or b"{}"))
        fields.require_known(FORK)
        head = await self._sessions.fork(
            owner_of(request),
            request.match_info["name"],
            fields.optional_text("name"),
            fields.integer("turns"),
        )
        return web.json_response(session_json(head), status=201)

    async def delete(self, request: web.Request) -> web.Response:
        """Delete a session; its blocks may leave first from then on."""
        name, owner = request.match_info["name"], owner_of(request)
        ended = await self._sessions.delete(owner, name)
        await self._service.note_end(owner, ended.messages, num_shared=ended.num_shared)
        return web.json_response({"id": name, "object": "session", "deleted": True})


def session_json(head: SessionHead) -> dict[str, object]:
    """Return a session as answers show it."""
    return {
        "object": "session",
        "id": head.name,
        "version": head.version,
        "num_turns": len(head.turns),
        "created_at": head.created_s,
        "forked_from": head.forked_from,
        "expires_in_s": round(head.expires_in_s, 3),
    }


def _message_json(message: ChatMessage) -> dict[str, object]:
    return {"role": message.role, "content": message.content}


def _listed(text: str | None) -> int:
    if text is None:
        return _DEFAULT_LISTED
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:10]) <= _MAX_LISTED:
        raise ApiError(400, f"limit must be a whole number from 1 to {_MAX_LISTED}", param="limit")
    return int(text)
