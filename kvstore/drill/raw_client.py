"""RawClient: one connection that speaks the protocol itself, to hold leases and slots, and to misbehave."""

import time
from typing import Self

from kvstore.arena_link import ArenaCache
from kvstore.arena_view import ArenaView
from kvstore.errors import ServerUnavailable
from kvstore.keys import Namespace, PrefixChain
from kvstore.link import Dial, Link
from kvstore.messages import Answer, ChainRef, Failed, Fetch, Lent, OpenNamespace, Ready, Request, Reserve
from kvstore.messages import timeout_us as as_timeout_us

_PATIENT_S = 5.0


class RawClient:
    """Leases and slots that it is given stay its own until it says otherwise, or ends."""

    def __init__(self, dial: Dial, namespace: Namespace) -> None:
        self.link = Link.open(dial, ArenaCache(), time.monotonic() + _PATIENT_S)
        self.ask(OpenNamespace(namespace))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()

    @property
    def reading(self) -> ArenaView:
        """The arena, read-only."""
        assert self.link.arena is not None, "the server sent no arena"
        return self.link.arena.reading

    @property
    def writing(self) -> ArenaView:
        """The arena, writable."""
        assert self.link.arena is not None, "the server sent no arena"
        assert self.link.arena.writing is not None, "the server sent no writable arena"
        return self.link.arena.writing

    def ask(self, request: Request) -> Answer:
        """Send a request and return its answer.

        Raises:
            ServerUnavailable: the server went away or refuses.
        """
        answer = self.link.ask(request, time.monotonic() + _PATIENT_S)
        if isinstance(answer, Failed):
            raise ServerUnavailable(f"server: refuses {type(request).__name__}: {answer.to_error()}")
        return answer

    def lease(self, chain: PrefixChain) -> Ready:
        """Have the stored prefix of a chain leased."""
        answer = self.ask(Fetch(ChainRef(chain, None), as_timeout_us(_PATIENT_S / 2)))
        assert isinstance(answer, Ready), "the link checked the kind of answer"
        return answer

    def reserve(self, chain: PrefixChain) -> Lent:
        """Have slots lent for the blocks of a chain that are not stored."""
        answer = self.ask(Reserve(ChainRef(chain, None), as_timeout_us(_PATIENT_S / 2)))
        assert isinstance(answer, Lent), "the link checked the kind of answer"
        return answer
