"""Sessions: named conversations whose history is kept in records.

A session is a head, a record that names its turns in order, and the turns, records that never change: a new
turn is written first, then the head, if it still has the version that was read. Whoever comes second is told
so; a history is never mixed. A fork is a head that names the same turns.

Ownership: a head knows how many of its leading turns other heads may name too. Deleting a session drops the
turns behind these, and of these the ones that no other head of the owner names.
"""

import contextlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvstore.records import Record, RecordOutcome
from kvstore_engine_adapter.faces.api_error import ApiError
from kvstore_engine_adapter.faces.chat_request import SessionChoice
from kvstore_engine_adapter.faces.record_access import (
    SESSIONS,
    TURNS,
    Owner,
    RecordAccess,
    damaged,
    decode,
    encode,
    unavailable,
)
from kvstore_engine_adapter.tokenizer import ChatMessage

logger = logging.getLogger(__name__)

MAX_TURNS = 4096
"""Turns of one session."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_TURN = re.compile(r"[0-9a-f]{32}")
_MAX_ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class SessionHead:
    """A session as its record tells it. ``created_s`` is in Unix seconds.

    The first ``num_shared`` turns may be named by other heads too. ``version`` is the record's, 0 for a
    session that is not stored yet.
    """

    name: str
    turns: tuple[str, ...] = ()
    num_shared: int = 0
    created_s: int = 0
    forked_from: str | None = None
    version: int = 0
    expires_in_s: float = 0.0

    def to_record(self) -> bytes:
        """Return its record's value."""
        return encode(
            {
                "turns": list(self.turns),
                "num_shared": self.num_shared,
                "created_s": self.created_s,
                "forked_from": self.forked_from,
            }
        )

    @classmethod
    def from_record(cls, name: str, record: Record) -> "SessionHead":
        """Return the head in a record. Raises ApiError (500) if it is none."""
        value = decode(record, f"session {name}")
        match value:
            case {
                "turns": list() as turns,
                "num_shared": int() as num_shared,
                "created_s": int() as created_s,
                "forked_from": str() | None as forked_from,
            } if _are_turns(turns) and 0 <= num_shared <= len(turns):
                return cls(
                    name,
                    tuple(turns),
                    num_shared,
                    created_s,
                    forked_from,
                    record.version,
                    record.expires_in_s,
                )
        raise damaged(f"session {name}")


@dataclass(frozen=True, slots=True)
class EndedHistory:
    """The messages of a history that ended, of which the first ``num_shared`` go on in another one."""

    messages: tuple[ChatMessage, ...] = ()
    num_shared: int = 0


class Sessions:
    """The sessions of all owners on one replica; other replicas may have the same ones in hand."""

    def __init__(self, access: RecordAccess, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._access = access
        self._wall_clock = wall_clock
        self._in_hand: set[tuple[bytes, str]] = set()

    @property
    def ttl_s(self) -> float:
        """How long a session stays after its last use."""
        return self._access.limits.ttl_s

    async def create(self, owner: Owner, name: str | None, messages: Sequence[ChatMessage]) -> SessionHead:
        """Make a session whose history begins with some messages.

        Raises:
            ApiError: 409 there is one of that name; 400 the name can be none; 429 and 503 as
                ``RecordAccess.put``.
        """
        head = SessionHead(_new_name() if name is None else require_name(name), created_s=self._now_s())
        if messages:
            head = replace(head, turns=(await self._write_turn(owner, messages),))
        return await self._make(owner, head)

    async def fork(self, owner: Owner, name: str, new_name: str | None, turns: int | None) -> SessionHead:
        """Make a session that has the history of another, or its first ``turns`` turns.

        Raises:
            ApiError: 404 there is none; 400 it has fewer turns; else as ``create``.
        """
        wanted = _new_name() if new_name is None else require_name(new_name, "name")
        for _ in range(_MAX_ATTEMPTS):
            head = await self.head(owner, name)
            count = len(head.turns) if turns is None else turns
            if not 0 <= count <= len(head.turns):
                raise ApiError(400, f"turns is {count}, the session has {len(head.turns)}", param="turns")
            shared = replace(head, num_shared=max(head.num_shared, count))
            # The origin first: from then on its end does not take the turns along.
            if shared == head or await self._replace(owner, shared):
                await self._messages(owner, name, head.turns[:count])
                fork = SessionHead(
                    wanted, head.turns[:count], count, self._now_s(), forked_from=f"{name}@{count}"
                )
                return await self._make(owner, fork)
        raise _conflict(name)

    async def head(self, owner: Owner, name: str) -> SessionHead:
        """Return a session's head.

        Raises:
            ApiError: 404 there is none of this owner's; 503 it is not known.
        """
        record = await self._access.get(owner, SESSIONS, name) if _NAME.fullmatch(name) else None
        if record is None:
            raise ApiError(
                404,
                f"the session {name[:200]!r} does not exist, or its time is over",
                param="kvstore.session",
                code="session_not_found",
            )
        return SessionHead.from_record(name, record)

    async def history(self, owner: Owner, name: str) -> tuple[SessionHead, list[list[ChatMessage]]]:
        """Return a session's head and the messages of each turn. Raises as ``head``."""
        head = await self.head(owner, name)
        return head, await self._messages(owner, name, head.turns)

    async def page(self, owner: Owner, *, after: str, limit: int) -> list[dict[str, object]]:
        """Return an owner's sessions by name, as JSON. Raises ApiError (503)."""
        found = await self._access.page(owner, SESSIONS, after=after, limit=limit)
        return [
            {
                "object": "session",
                "id": info.name,
                "version": info.version,
                "expires_in_s": round(info.expires_in_s, 3),
            }
            for info in found
        ]

    async def delete(self, owner: Owner, name: str) -> EndedHistory:
        """Drop a session and what only it refers to; returns what nobody can continue any more.

        Raises:
            ApiError: 404 there is none; 503 it is not known whether all is gone.
        """
        head = await self.head(owner, name)
        await self._access.drop(owner, SESSIONS, name)
        gone = set(head.turns)
        if head.num_shared:
            gone -= await self._named_turns(owner)
        ended = await self._ended(owner, head, gone)
        for turn in gone:
            await self._access.drop(owner, TURNS, turn)
        return ended

    async def _ended(self, owner: Owner, head: SessionHead, gone: set[str]) -> EndedHistory:
        """Return a history of which some turns are about to go; nothing where it cannot be read."""
        if not gone:
            return EndedHistory()
        try:
            found = await self._access.get_all(owner, TURNS, head.turns)
            turns = [messages_of(decode(at, head.name), head.name) for at in found if at is not None]
        except ApiError as error:
            logger.debug("sessions: the end of one is not told: %s", error)
            return EndedHistory()
        if len(turns) < len(head.turns):
            return EndedHistory()
        num_kept = next(index for index, turn in enumerate(head.turns) if turn in gone)
        kept = sum(map(len, turns[:num_kept]))
        return EndedHistory(tuple(message for turn in turns for message in turn), kept)

    @contextlib.contextmanager
    def in_hand(self, owner: Owner, name: str) -> Iterator[None]:
        """Continue a session inside the block: nobody else on this replica does meanwhile.

        Raises:
            ApiError: 409: somebody does.
        """
        key = (owner.salt, name)
        if key in self._in_hand:
            raise _conflict(name)
        self._in_hand.add(key)
        try:
            yield
        finally:
            self._in_hand.discard(key)

    async def begin_turn(self, owner: Owner, choice: SessionChoice) -> tuple[SessionHead, list[ChatMessage]]:
        """Return the head that a turn goes on from, and all messages of its history.

        Raises:
            ApiError: 404 there is no such session; 409 it has another version; 503 it is not known.
        """
        try:
            head, turns = await self.history(owner, require_name(choice.name))
        except ApiError as error:
            if error.code != "session_not_found" or not choice.creates:
                raise
            head, turns = SessionHead(choice.name, created_s=self._now_s()), []
        if choice.version is not None and choice.version != head.version:
            raise _conflict(head.name, f"it has version {head.version}, not {choice.version}")
        if len(head.turns) >= MAX_TURNS:
            raise ApiError(
                400, f"the session {head.name!r} has {MAX_TURNS} turns, the limit", code="session_too_long"
            )
        return head, [message for turn in turns for message in turn]

    async def end_turn(self, owner: Owner, head: SessionHead, messages: Sequence[ChatMessage]) -> SessionHead:
        """Add a turn behind the head it was begun from; returns the new head.

        Raises:
            ApiError: 409 somebody else has continued or dropped the session; 429 and 503 as
                ``RecordAccess.put``.
        """
        turn = await self._write_turn(owner, messages)
        current = head
        for _ in range(_MAX_ATTEMPTS):
            after = replace(current, turns=(*head.turns, turn))
            stored = await self._stored(owner, after)
            if stored is not None:
                return stored
            # A fork changes the head too, but nothing about the history.
            current = await self._latest(owner, head)
            if current.turns != head.turns or not current.version:
                break
        await self._give_up(owner, turn)
        raise _conflict(head.name)

    async def _latest(self, owner: Owner, head: SessionHead) -> SessionHead:
        """Return the head as it is, one without a version if there is none."""
        record = await self._access.get(owner, SESSIONS, head.name)
        return replace(head, version=0) if record is None else SessionHead.from_record(head.name, record)

    async def _make(self, owner: Owner, head: SessionHead) -> SessionHead:
        stored = await self._stored(owner, head)
        if stored is None:
            raise ApiError(
                409, f"the session {head.name!r} exists already", param="name", code="session_exists"
            )
        return stored

    async def _replace(self, owner: Owner, head: SessionHead) -> bool:
        return await self._stored(owner, head) is not None

    async def _stored(self, owner: Owner, head: SessionHead) -> SessionHead | None:
        """Store a head in place of the version it names; None if that is not the present one.

        Raises:
            ApiError: 503: it is not stored, or not known to be.
        """
        value = head.to_record()
        write = await self._access.put(owner, SESSIONS, head.name, value, if_version=head.version)
        if write.outcome is RecordOutcome.CONFLICT:
            return None
        version = write.version
        if write.is_doubtful:
            record = await self._access.get(owner, SESSIONS, head.name)
            if record is None or record.value != value or not record.is_current:
                raise unavailable(f"it is not known whether session {head.name} was stored: {write.problem}")
            version = record.version
        return replace(head, version=version, expires_in_s=self.ttl_s)

    async def _write_turn(self, owner: Owner, messages: Sequence[ChatMessage]) -> str:
        turn = secrets.token_hex(16)
        value = encode({"messages": [[message.role, message.content] for message in messages]})
        write = await self._access.put(owner, TURNS, turn, value, if_version=0)
        if not write.is_stored:
            raise unavailable(write.problem or "a turn was not stored")
        return turn

    async def _messages(self, owner: Owner, name: str, turns: Sequence[str]) -> list[list[ChatMessage]]:
        """Return the messages of turns, all of them or none; they stay for the promised time from now."""
        found = await self._access.get_all(owner, TURNS, turns)
        records = [record for record in found if record is not None]
        if len(records) < len(turns):
            raise ApiError(
                404,
                f"the session {name!r} has lost a part of its history: it cannot be continued",
                param="kvstore.session",
                code="session_history_lost",
            )
        await self._access.keep(owner, TURNS, turns, records)
        return [messages_of(decode(record, f"session {name}"), f"session {name}") for record in records]

    async def _named_turns(self, owner: Owner) -> set[str]:
        names = [info.name for info in await self._access.list_all(owner, SESSIONS)]
        records = await self._access.get_all(owner, SESSIONS, names)
        heads = [
            SessionHead.from_record(name, record)
            for name, record in zip(names, records, strict=True)
            if record is not None
        ]
        return {turn for head in heads for turn in head.turns}

    async def _give_up(self, owner: Owner, turn: str) -> None:
        try:
            await self._access.drop(owner, TURNS, turn)
        except ApiError as error:
            logger.warning("sessions: a turn that belongs to nothing stays until its time is over: %s", error)

    def _now_s(self) -> int:
        return int(self._wall_clock())


def messages_of(value: dict[str, object], what: str) -> list[ChatMessage]:
    """Return the messages in a record's value. Raises ApiError (500) if there are none."""
    messages = value.get("messages")
    if not isinstance(messages, list):
        raise damaged(what)
    found = []
    for entry in messages:
        match entry:
            case [str() as role, str() as content] if _is_text(content):
                found.append(ChatMessage(role, content))
            case _:
                raise damaged(what)
    return found


def _is_text(content: str) -> bool:
    """Whether every tokenizer takes it: JSON may hold lone surrogates."""
    try:
        content.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _are_turns(names: Sequence[object]) -> bool:
    return all(isinstance(name, str) and _TURN.fullmatch(name) for name in names)


def require_name(name: str, param: str = "kvstore.session") -> str:
    """Return the name of a session if it can be one. Raises ApiError (400)."""
    if not _NAME.fullmatch(name):
        raise ApiError(
            400,
            "a session's name is 1 to 128 letters, digits, dots, dashes and underscores, beginning with a"
            " letter or digit",
            param=param,
        )
    return name


def _new_name() -> str:
    return f"session-{secrets.token_hex(16)}"


def _conflict(name: str, why: str = "another request continues it, or has done so meanwhile") -> ApiError:
    return ApiError(
        409,
        f"session {name!r}: {why}: read it and try again",
        kind="conflict_error",
        param="kvstore.session",
        code="session_conflict",
    )
