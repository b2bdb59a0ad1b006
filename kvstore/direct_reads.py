"""Blocks read without asking: found in the table of READY ones, copied, checked, and the server told.

Nothing is taken on trust that an answer would not be: the entry has the block's full name under a valid seal,
and after the copy its checksum is right, its slot is in the same generation, and no era has ended. What is in
any doubt is left to a request, which finds out what is the matter.
"""

import time
from typing import Protocol, cast

from kvstore.arena_link import MappedArena
from kvstore.at_once import LosableLink, copy_limit
from kvstore.calls import FetchResult
from kvstore.client_state import ClientState
from kvstore.errors import ProtocolMismatch
from kvstore.fetch_calls import BufferSource, copied
from kvstore.hints import Hints
from kvstore.messages import ChainRef, NoteReads, ReadySlot, Request
from kvstore.ready_table import MAX_DIRECT_BLOCKS
from kvstore.transfer import ReadEnd, read_slots

_TIER = "dram"


class DirectLink(LosableLink, Protocol):
    """A connection, and the memory of the server behind it."""

    arena: MappedArena | None

    @property
    def is_traced(self) -> bool:
        """Whether a request sent now would belong to a span."""

    def tell_if_heard(self, message: Request) -> bool:
        """Send a message that has no answer, unless the server is behind with reading."""


def is_direct(num_blocks: int) -> bool:
    """Whether so few blocks are looked for in the table."""
    return 0 < num_blocks <= MAX_DIRECT_BLOCKS


def read_directly(
    link: DirectLink,
    state: ClientState,
    about: ChainRef,
    buffers: BufferSource,
    *,
    length_bytes: int,
    deadline_s: float,
    hints: Hints | None,
) -> FetchResult | None:
    """Copy blocks that are all in the table, on the caller's thread; None if they have to be asked for.

    A call whose time is up, and one that belongs to a span, ask too: so it is seen what became of them.
    """
    arena, now_s = link.arena, time.monotonic()
    if arena is None or arena.ready is None or now_s >= deadline_s or link.is_traced:
        return None
    table, chain = arena.ready, about.chain
    era = table.era(now_s)
    if not era or len(set(chain.keys)) < len(chain.keys):  # a block named twice is the server's to refuse
        return None
    found = table.find(chain.keys, state.name_end(chain, about.part), length_bytes, era)
    if found is None:
        return None
    slots = cast("list[ReadySlot]", found)  # plain tuples do as well, and are made in less time
    try:
        good, end = read_slots(arena.reading, slots, buffers(0, len(slots)), copy_limit(link, deadline_s))
    except ProtocolMismatch:  # no slot of this arena: whatever the table is, it is not used
        return None
    if end is ReadEnd.STALE or end is ReadEnd.DAMAGED or not good or not table.is_of_era(era):
        return None
    read = about if end is ReadEnd.ALL else ChainRef(chain[:good], about.part)
    state.note_direct(good, is_told=link.tell_if_heard(NoteReads(read, hints)))
    return copied(slots[:good], _TIER, end, deadline_s)
