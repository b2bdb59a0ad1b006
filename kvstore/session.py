"""One call of a blocking client, carried out step by step on one connection."""

import time
from collections.abc import Callable
from typing import TypeVar

from kvstore.arena_link import MappedArena
from kvstore.calls import Ask, Connection, Plan, Step, Tell
from kvstore.client_state import ClientState
from kvstore.errors import ServerUnavailable
from kvstore.keys import Namespace
from kvstore.link import Link
from kvstore.messages import Answer, Failed, FailureCode, OpenNamespace, Request
from kvstore.shared_link import SharedLink
from kvstore.stock import Stock
from kvstore.transfer import SlotReader

T = TypeVar("T")

_LOOK_S = 0.001
"""How often a copy under way looks whether its connection still stands."""


class CallSession:
    """One call on one connection."""

    def __init__(
        self, link: Link | SharedLink, state: ClientState, deadline_s: float, namespace: Namespace | None
    ) -> None:
        self._link = link
        self._namespace = namespace
        self._state = state
        self._deadline_s = deadline_s
        self._next_look_s = 0.0
        self._is_lost = False

    @property
    def connection(self) -> Connection:
        """The connection itself."""
        return self._link

    def remaining_s(self) -> float:
        """Seconds until the call must be over; not negative."""
        return max(0.0, self._deadline_s - time.monotonic())

    def is_over(self) -> bool:
        """Whether a copy should stop: time is up, or the connection is lost (seen within 1 ms)."""
        now_s = time.monotonic()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + _LOOK_S
            self._is_lost = self._is_lost or self._link.is_lost
        return self._is_lost or now_s >= self._deadline_s

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
        return self._link.stock if isinstance(self._link, Link) else None

    def note_corrupt(self) -> None:
        """Count a block whose bytes were wrong."""
        self._state.note_corrupt()

    def carry_out(self, step: Step) -> Answer | object:
        """Do what a plan asks for, and return what it gets."""
        if isinstance(step, Ask):
            return self._ask(step.request, step.meanwhile)
        if isinstance(step, Tell):
            self._link.tell(step.message)
            return None
        return step.run(self.is_over)

    def open_namespace(self) -> None:
        """Tell the server of the call's namespace, if it has one."""
        if self._namespace is not None:
            answer = self._link.ask(OpenNamespace(self._namespace), self._deadline_s)
            if isinstance(answer, Failed):
                raise answer.to_error()
            self._link.opened.add(self._namespace.digest)

    def _ask(self, request: Request, meanwhile: Callable[[], object] | None) -> Answer:
        """Ask, once more if the server has forgotten the namespace meanwhile."""
        if meanwhile is not None and isinstance(self._link, Link):
            answer = self._link.ask(request, self._deadline_s, meanwhile)
        else:
            answer = self._link.ask(request, self._deadline_s)
        if self._namespace is not None and _is_forgotten(answer):
            self.open_namespace()
            answer = self._link.ask(request, self._deadline_s)
            if _is_forgotten(answer):
                raise ServerUnavailable("server: it forgot the namespace again: too many are in use there")
        return answer


def _is_forgotten(answer: Answer) -> bool:
    return isinstance(answer, Failed) and answer.code is FailureCode.NAMESPACE_NOT_OPEN


def follow(plan: Plan[T], session: CallSession) -> T:
    """Carry out a plan's steps until it returns."""
    try:
        step = next(plan)
        while True:
            try:
                outcome = session.carry_out(step)
            except BaseException as error:  # whatever it is, the plan gives back what it holds and re-raises
                step = plan.throw(error)
            else:
                step = plan.send(outcome)
    except StopIteration as end:
        value: T = end.value
        return value
