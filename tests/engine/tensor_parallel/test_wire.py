"""Messages between ranks: round trips, and what is no message."""

import msgpack
import pytest

from kvstore.errors import ProtocolMismatch
from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.tier import ReadStatus, WriteStatus
from kvstore_engine_adapter.attention import Segment
from kvstore_engine_adapter.tensor_parallel import messages, wire
from kvstore_engine_adapter.tensor_parallel.wire import LENGTH, Pass


def body(data):
    assert wire.frame_length(data[: LENGTH.size]) == len(data) - LENGTH.size
    return data[LENGTH.size :]


def test_a_pass_arrives_as_it_was_sent():
    work = Pass(7, [(1, 2)], [3, 4], [Segment([5, 70000], 16, [2, 3]), Segment([1], 0, [4])])
    assert Pass.unpack(body(work.pack())) == work


def test_a_message_arrives_as_it_was_sent():
    sent = messages.Read([b"n" * 32], [b"k" * 32], [b"p" * 32], [3], [9], 0.5)
    assert wire.message_of(wire.unframe(body(wire.frame(sent.values())))) == sent


def test_a_namespace_arrives_with_its_digest():
    layout = KVLayout("bfloat16", 3, 16, 2, 16)
    namespace = Namespace("m", layout, "w in 2 shards", rope="r", tenant_salt=b"secret" * 4, epoch=3)
    sent = messages.KnowNamespace.of(namespace)
    came = wire.message_of(wire.unframe(body(wire.frame(sent.values()))))
    assert came.namespace().digest == namespace.digest


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", msgpack.packb({"a": 1}), msgpack.packb(3), msgpack.packb([msgpack.ExtType(1, b"x")])],
)
def test_what_is_no_array_of_plain_values_is_refused(data):
    with pytest.raises(ProtocolMismatch):
        wire.unframe(data)


def test_a_call_of_the_store_that_fails_is_answered_as_a_miss_and_nothing_else_is():
    blocks = ([b"n" * 32] * 2, [b"k" * 32] * 2)
    read, write = (kind(*blocks, [], [], [], 1.0) for kind in (messages.Read, messages.Write))
    assert (
        messages.nothing_of(read)
        == messages.nothing_of(write)
        == messages.Outcomes([ReadStatus.UNAVAILABLE.value] * 2, ["", ""])
    )
    assert ReadStatus.UNAVAILABLE.value == WriteStatus.UNAVAILABLE.value
    assert messages.nothing_of(messages.Probe(*blocks, 1.0)) == messages.Probed([], "unavailable")
    assert messages.nothing_of(messages.Drop(*blocks)) == messages.Done()
    assert messages.nothing_of(messages.Prepare(64)) is None


@pytest.mark.parametrize("values", [[], ["Unheard"], ["Ping", 1], ["Read"]])
def test_what_is_no_message_is_refused(values):
    with pytest.raises(ProtocolMismatch):
        wire.message_of(values)


@pytest.mark.parametrize("values", [[], [1, 2, 3], [1, [], [], [[b"x"]]], [1, [[1]], [], []]])
def test_what_is_no_pass_is_refused(values):
    with pytest.raises(ProtocolMismatch):
        Pass.unpack(msgpack.packb(values))


def test_a_message_too_large_is_neither_sent_nor_waited_for():
    with pytest.raises(ProtocolMismatch, match="limit"):
        wire.frame([b"x" * wire.MAX_FRAME_BYTES])
    with pytest.raises(ProtocolMismatch, match="limit"):
        wire.frame_length(LENGTH.pack(wire.MAX_FRAME_BYTES + 1))
