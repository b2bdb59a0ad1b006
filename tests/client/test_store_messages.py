"""Messages of a put in one exchange that do not add up."""

from contextlib import nullcontext
from typing import Any

import msgpack
import pytest

from kvstore.errors import ProtocolMismatch
from kvstore.keys import BlockKey, NamespaceDigest, PrefixChain
from kvstore.messages import ChainRef, Commit, FilledSlots, Store, Stored, decode_answer, decode_request
from kvstore.wire import MAX_KEYS, Frame

_KEYS = (BlockKey(b"\x01" * 32), BlockKey(b"\x02" * 32))
_CHAIN = ChainRef(PrefixChain(NamespaceDigest(bytes(range(32))), _KEYS, 16))
_FILLED = Store(_CHAIN, FilledSlots((4096, 8192), (1, 3), (2, 4)), 2).to_wire()


@pytest.mark.parametrize(
    "values",
    [
        _FILLED[:-1],
        (*_FILLED, None),
        (*_FILLED[:-1], -1),
        (*_FILLED[:-1], MAX_KEYS + 1),
        (*_FILLED[:-2], b"", 2),
        (*_FILLED[:-2], bytes(24), 2),
        (*_FILLED[:-2], bytes(72), 2),
        (*_FILLED[:-2], bytes(48), 2),
    ],
)
def test_a_store_that_has_not_one_slot_for_each_block_breaks_the_protocol(values: Any) -> None:
    with pytest.raises(ProtocolMismatch):
        decode_request(Frame(Store.KIND, 1, msgpack.packb(values)))


@pytest.mark.parametrize(("offset", "is_refused"), [(8192, True), (8193, False)])
def test_of_many_slots_none_may_be_named_twice(offset: int, *, is_refused: bool) -> None:
    keys = tuple(BlockKey(bytes([number]) * 32) for number in range(100))
    offsets = (*[4096 * at for at in range(99)], offset)
    slots = FilledSlots(offsets, (1,) * 100, (2,) * 100)
    store = Store(ChainRef(PrefixChain(_CHAIN.chain.namespace, keys, 16)), slots, 2)
    frame = Frame(Store.KIND, 1, msgpack.packb(store.to_wire()))

    with pytest.raises(ProtocolMismatch, match="twice") if is_refused else nullcontext():
        assert decode_request(frame) == store


@pytest.mark.parametrize("ahead", [0, -1, MAX_KEYS + 1, None, True])
def test_a_commit_wants_some_slots_ahead_or_does_not_speak_of_them(ahead: Any) -> None:
    values = (*Commit(_CHAIN, ()).to_wire(), ahead)

    with pytest.raises(ProtocolMismatch):
        decode_request(Frame(Commit.KIND, 1, msgpack.packb(values)))


@pytest.mark.parametrize(
    "values",
    [
        (1, b"", None, b""),
        (1, b"\x00\x00", None, b"", 0),
        (0, b"\x03", None, b"", 0),
        (-1, b"", None, b"", 0),
        (1, b"", "no reason", b"", 0),
        (1, b"", None, bytes(15), 0),
        (1, b"", None, bytes(16 * (MAX_KEYS + 1)), 0),
        (1, b"", None, "slots", 0),
        (1, b"", None, b"", -1),
    ],
)
def test_outcomes_that_do_not_add_up_break_the_protocol(values: Any) -> None:
    with pytest.raises(ProtocolMismatch):
        decode_answer(Frame(Stored.KIND, 1, msgpack.packb(values)))
