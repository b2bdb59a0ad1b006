"""StoredResponses: responses that later ones may go on from, each kept in a record.

A response's record holds its own turn and the names of all responses before it, oldest first: the history is
read in one go, and two responses that go on from the same one share it.
"""

import asyncio
import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.records import RecordInfo
from kvstore_engine_adapter.faces.api_error import ApiError
from kvstore_engine_adapter.faces.record_access import (
    RESPONSES,
    Owner,
    RecordAccess,
    damaged,
    decode,
    encode,
    unavailable,
)
from kvstore_engine_adapter.faces.sessions import EndedHistory, messages_of
from kvstore_engine_adapter.tokenizer import ChatMessage

logger = logging.getLogger(__name__)

MAX_ANCESTORS = 4096
"""Responses before one."""

_PATIENCE_S = 2.0
_SLOW_S = 0.5
_PAUSE_S = 5.0

_ID = re.compile(r"resp_[0-9a-f]{32}")
_MAX_DROPS = 256


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as its record tells it.

    ``response`` is what the client got, ``items`` its input, ``messages`` both as a chat; ``ancestors`` are
    the responses before it, oldest first.
    """

    response: dict[str, object]
    items: list[object]
    messages: tuple[ChatMessage, ...]
    ancestors: tuple[str, ...] = ()


class StoredResponses:
    """The stored responses of all owners.

    Storing one holds up its answer, whatever becomes of it, so it has 2 seconds; after one that took more
    than half a second none is tried for 5 seconds.
    """

    def __init__(self, access: RecordAccess, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._access = access
        self._clock = clock
        self._paused_until_s = -math.inf

    async def get(self, owner: Owner, response_id: str) -> StoredResponse:
        """Return a response.

        Raises:
            ApiError: 404 there is none of this owner's; 503 it is not known.
        """
        record = await self._access.get(owner, RESPONSES, response_id) if _is_id(response_id) else None
        if record is None:
            raise ApiError(
                404,
                f"the response {response_id[:100]!r} does not exist, was not stored, or its time is over",
                param="response_id",
                code="response_not_found",
            )
        return _read(decode(record, f"response {response_id}"), response_id)

    async def history(self, owner: Owner, response_id: str) -> tuple[list[ChatMessage], list[str]]:
        """Return all messages up to a response, its own too, and the names of these responses.

        Raises:
            ApiError: 400 there is none of this owner's, or its history is not whole; 503 it is not known.
        """
        try:
            last = await self.get(owner, response_id)
        except ApiError as error:
            if error.status != 404:
                raise
            raise _not_found(f"{error}") from error
        if len(last.ancestors) >= MAX_ANCESTORS:
            raise _not_found(f"the response {response_id!r} has {MAX_ANCESTORS} before it, the limit")
        names = [*last.ancestors, response_id]
        found = await self._access.get_all(owner, RESPONSES, names)
        records = [record for record in found if record is not None]
        if len(records) < len(names):
            raise _not_found(f"a response before {response_id!r} was deleted, or its time is over")
        await self._access.keep(owner, RESPONSES, names, records)
        turns = [_read(decode(record, name), name) for name, record in zip(names, records, strict=True)]
        return [message for turn in turns for message in turn.messages], names

    async def store(self, owner: Owner, response_id: str, stored: StoredResponse) -> None:
        """Store a response. Where the owner's quota is used up, the ones that were not used for longest go.

        Raises:
            ApiError: 429 that did not make room enough; 503 it was not stored; 400 it is too long.
        """
        if self._clock() < self._paused_until_s:
            raise unavailable("the store was slow before")
        begun_s = self._clock()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._store(owner, response_id, stored)
        except TimeoutError as error:
            raise unavailable(f"the store did not answer within {_PATIENCE_S:g} seconds") from error
        finally:
            if self._clock() - begun_s > _SLOW_S:
                self._paused_until_s = self._clock() + _PAUSE_S

    async def _store(self, owner: Owner, response_id: str, stored: StoredResponse) -> None:
        value = encode(
            {
                "response": stored.response,
                "items": stored.items,
                "messages": [[message.role, message.content] for message in stored.messages],
                "ancestors": list(stored.ancestors),
            }
        )
        await self._make_room(owner, len(value), keeping=frozenset(stored.ancestors))
        write = await self._access.put(owner, RESPONSES, response_id, value, if_version=0)
        if not write.is_stored:
            raise unavailable(write.problem or "the response was not stored")

    async def delete(self, owner: Owner, response_id: str) -> EndedHistory:
        """Drop a response; those that go on from it cannot be gone on from any more.

        Returns the history that ends with it; that of the responses before it is shared.

        Raises:
            ApiError: 404 there is none; 503 it is not known.
        """
        last = await self.get(owner, response_id)
        ended = await self._ended(owner, last)
        await self._access.drop(owner, RESPONSES, response_id)
        return ended

    async def _ended(self, owner: Owner, last: StoredResponse) -> EndedHistory:
        """Return the history up to a response; nothing where it cannot be read as a whole."""
        try:
            found = await self._access.get_all(owner, RESPONSES, last.ancestors)
            before = [_read(decode(at, "a response"), "a response") for at in found if at is not None]
        except ApiError as error:
            logger.debug("responses: the end of one is not told: %s", error)
            return EndedHistory()
        if len(before) < len(last.ancestors):
            return EndedHistory()
        instructions = last.response.get("instructions")
        system = [ChatMessage("system", instructions)] if isinstance(instructions, str) else []
        shared = [*system, *(message for turn in before for message in turn.messages)]
        return EndedHistory((*shared, *last.messages), len(shared))

    async def _make_room(self, owner: Owner, more_bytes: int, *, keeping: frozenset[str]) -> None:
        if await self._access.has_room(owner, more_bytes):
            return
        infos = [at for at in await self._access.list_all(owner, RESPONSES) if at.name not in keeping]
        for info in _oldest(infos, more_bytes):
            await self._access.drop(owner, RESPONSES, info.name)


def _oldest(infos: Sequence[RecordInfo], more_bytes: int) -> list[RecordInfo]:
    """Return the records that end soonest and make the most room needed, and some more."""
    found: list[RecordInfo] = []
    freed_bytes = 0
    for info in sorted(infos, key=lambda at: at.expires_in_s):
        if freed_bytes >= 2 * more_bytes or len(found) == _MAX_DROPS:
            break
        found.append(info)
        freed_bytes += info.value_bytes
    return found


def _read(value: dict[str, object], what: str) -> StoredResponse:
    match value:
        case {"response": dict() as response, "items": list() as items, "ancestors": list() as ancestors} if (
            all(_is_id(name) for name in ancestors)
        ):
            return StoredResponse(
                response, items, tuple(messages_of(value, what)), tuple(map(str, ancestors))
            )
    raise damaged(what)


def _is_id(name: object) -> bool:
    return isinstance(name, str) and _ID.fullmatch(name) is not None


def _not_found(message: str) -> ApiError:
    return ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
