"""Keys in messages: however many, they arrive as they were sent, and none twice."""

from hashlib import sha256

import pytest

from kvstore.errors import InvalidRequest
from kvstore.keys import BlockKey, NamespaceDigest, PrefixChain
from kvstore.messages import ChainRef, Match, Request, decode_request, encode_message
from kvstore.wire import FrameDecoder

DIGEST = NamespaceDigest(bytes(range(32)))


def _sent(request: Request) -> Request:
    frame = FrameDecoder(encode_message(request, 1)).next_frame()
    assert frame is not None
    return decode_request(frame)


@pytest.mark.parametrize("count", [0, 1, 2, 256, 257, 1024, 1025, 3000])
def test_keys_arrive_as_they_were_sent_however_many(count: int) -> None:
    about = ChainRef(PrefixChain(DIGEST, _many_keys(count), 16))

    assert _sent(Match(about, 1)) == Match(about, 1)


@pytest.mark.parametrize("count", [2, 64, 1024, 1025, 3000])
def test_of_however_many_keys_no_two_may_be_equal(count: int) -> None:
    keys = _many_keys(count)
    twice = ChainRef(PrefixChain(DIGEST, (*keys[:-1], keys[0]), 16))

    with pytest.raises(InvalidRequest, match="names a block twice"):
        _sent(Match(twice, 1))


def test_of_thousands_of_keys_some_may_begin_alike() -> None:
    keys = _many_keys(3000)
    alike = BlockKey(keys[0][:16] + bytes(16))
    about = ChainRef(PrefixChain(DIGEST, (*keys, alike), 16))

    assert _sent(Match(about, 1)) == Match(about, 1)


def _many_keys(count: int) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(sha256(number.to_bytes(4, "big")).digest()) for number in range(count))
