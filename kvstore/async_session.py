"""One call of an asyncio client, carried out step by step on the connection."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvstore.arena_link import MappedArena
from kvstore.async_link import AsyncLink
from kvstore.calls import Ask, Connection, Plan, Step, Tell, Work
from kvstore.client_state import ClientState
from kvstore.errors import ServerUnavailable
from kvstore.keys import Namespace
from kvstore.messages import Answer, Failed, FailureCode, OpenNamespace, Request
from kvstore.outlasting import outlast
from kvstore.stock import Stock
from kvstore.transfer import SlotReader

T = TypeVar("T")

INLINE_BYTES = 256 << 10
"""Copies up to this size run on the loop's thread: a thread switch would cost more than the copy."""


class AsyncCallSession:
    """One call on the connection."""

    def __init__(
        self,
        link: AsyncLink,
        state: ClientState,
        copiers: ThreadPoolExecutor,
        deadline_s: float,
        namespace: Namespace | None,
    ) -> None:
        self._link = link
        self._namespace = namespace
        self._state = state
        self._copiers = copiers
        self._deadline_s = deadline_s

    @property
    def connection(self) -> Connection:
        """The connection itself."""
        return self._link

    def remaining_s(self) -> float:
        """Seconds until the call must be over; not negative."""
        return max(0.0, self._deadline_s - time.monotonic())

    def reading_arena(self) -> SlotReader:
        """Return the arena for reading. Raises ServerUnavailable if the server has none."""
        return self.mapped_arena().reading

    def writing_arena(self) -> SlotReader:
        """Return the arena for writing. Raises ServerUnavailable if the server has sent none."""
        writing = self.mapped_arena().writing
        if writing is None:
            raise ServerUnavailable("server: it sent no arena to put into")
        return writing

    def mapped_arena(self) -> MappedArena:
        """Return the arena as it is mapped here. Raises ServerUnavailable if the server has none."""
        if self._link.arena is None:
            raise ServerUnavailable("server: it has no arena")
        return self._link.arena

    @property
    def stock(self) -> Stock | None:
        """Slots lent ahead to the connection; None if that takes none."""
        return self._link.stock

    def note_corrupt(self) -> None:
        """Count a block whose bytes were wrong."""
        self._state.note_corrupt()

    async def carry_out(self, step: Step) -> Answer | object:
        """Do what a plan asks for, and return what it gets."""
        if isinstance(step, Ask):
            return await self._ask(step.request)
        if isinstance(step, Tell):
            self._link.tell(step.message)
            return None
        return await self._copy(step)

    async def open_namespace(self) -> None:
        """Tell the server of the call's namespace, if it has one."""
        if self._namespace is not None:
            answer = await self._link.ask(OpenNamespace(self._namespace), self._deadline_s)
            if isinstance(answer, Failed):
                raise answer.to_error()
            self._link.opened.add(self._namespace.digest)

    async def _ask(self, request: Request) -> Answer:
        """Ask, once more if the server has forgotten the namespace meanwhile."""
        answer = await self._link.ask(request, self._deadline_s)
        if self._namespace is not None and _is_forgotten(answer):
            await self.open_namespace()
            answer = await self._link.ask(request, self._deadline_s)
            if _is_forgotten(answer):
                raise ServerUnavailable("server: it forgot the namespace again: too many are in use there")
        return answer

    async def _copy(self, work: Work) -> object:
        """Run a copy; when the caller is cancelled, stop it and wait until it touches no buffer any more.

        A lost connection stops it too: what its slots were lent for has ended.
        """
        link, is_abandoned = self._link, threading.Event()
        if link.is_lost:
            raise ServerUnavailable("server: connection lost")

        def should_stop() -> bool:
            return is_abandoned.is_set() or link.is_lost or time.monotonic() >= self._deadline_s

        if work.size_bytes <= INLINE_BYTES:
            return work.run(should_stop)
        running = asyncio.get_running_loop().run_in_executor(self._copiers, work.run, should_stop)
        return await outlast(running, when_cancelled=is_abandoned.set)


def _is_forgotten(answer: Answer) -> bool:
    return isinstance(answer, Failed) and answer.code is FailureCode.NAMESPACE_NOT_OPEN


async def follow_async(plan: Plan[T], session: AsyncCallSession) -> T:
    """Carry out a plan's steps until it returns."""
    try:
        step = next(plan)
        while True:
            try:
                outcome = await session.carry_out(step)
            except BaseException as error:  # whatever it is, the plan gives back what it holds and re-raises
                step = plan.throw(error)
            else:
                step = plan.send(outcome)
    except StopIteration as end:
        value: T = end.value
        return value
