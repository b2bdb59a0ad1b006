"""Calls carried out at once, without a plan's steps: the connection they need, and when their copies stop."""

import time
from collections.abc import Callable
from typing import Protocol

from kvstore.arena_link import MappedArena
from kvstore.messages import Answer, Request
from kvstore.stock import Stock

_LOOK_S = 0.001
"""How long a copy goes on before it looks whether its connection still stands."""


class LosableLink(Protocol):
    """A connection, as far as a copy looks at it."""

    @property
    def is_lost(self) -> bool:
        """Whether the server has ended it."""


class Link(LosableLink, Protocol):
    """A connection that asks at once."""

    arena: MappedArena | None
    stock: Stock | None

    def ask(self, request: Request, deadline_s: float) -> Answer:
        """Send a request and return its answer."""

    def tell(self, message: Request) -> None:
        """Send a message that has no answer."""


def copy_limit(link: LosableLink, deadline_s: float) -> Callable[[], bool]:
    """Return what says whether a copy should stop: time is up, or the connection is lost (within 1 ms)."""
    next_look_s = time.monotonic() + _LOOK_S

    def is_over() -> bool:
        nonlocal next_look_s
        now_s = time.monotonic()
        if now_s < next_look_s:
            return now_s >= deadline_s
        next_look_s = now_s + _LOOK_S
        return now_s >= deadline_s or link.is_lost

    return is_over
