"""A process that sends spoilt frames to a server: ``python -m tests.server.fuzzer SOCKET FRAMES SEED``.

With a fourth argument it sends whole frames instead, for comparison.
"""

import contextlib
import json
import os
import random
import socket
import struct
import sys
import time
from collections.abc import Callable

import msgpack

from kvstore.keys import PrefixChain
from kvstore.layout import Part
from kvstore.messages import (
    AskSizes,
    ChainRef,
    Check,
    Commit,
    Demote,
    Drop,
    Exists,
    Fetch,
    FilledSlots,
    Flush,
    Hello,
    HelloReader,
    KeySet,
    LeaseChain,
    ListNamespaces,
    Match,
    MatchAndLease,
    OpenNamespace,
    Ping,
    Prefetch,
    Release,
    Renew,
    ReportDamage,
    Request,
    Reserve,
    ReturnSlots,
    Stats,
    Store,
    UnusedSlot,
    Why,
    WrittenSlot,
    encode_message,
)
from kvstore.wire import PREFIX_BYTES
from tests.client.conftest import NAMESPACE

_PAUSE_S = 0.0002
"""Between frames: without it this process and the server fill two cores, which slows others by itself."""

_CHAIN = NAMESPACE.chain(range(32))
_FUZZED = NAMESPACE.chain(range(5000, 5032))


def requests(choose: random.Random) -> list[Request]:
    """One whole request of every kind, about blocks that are stored and blocks that are not."""
    chain: PrefixChain = choose.choice((_CHAIN, _FUZZED))[: choose.randint(0, 8)]
    about = ChainRef(chain, choose.choice((None, Part(0, 1, 0, 1))))
    lease, slot = choose.randrange(1 << 16), 4096 * choose.randrange(4096)
    time_us = choose.choice((0, 1000))
    return [
        OpenNamespace(NAMESPACE),
        Match(about, time_us),
        Fetch(about, time_us),
        Release(lease, about if len(chain) else None),
        Reserve(ChainRef(_FUZZED, None), time_us),
        Commit(about, tuple(WrittenSlot(at, slot + at, 1, 7) for at in range(len(chain)))),
        Commit(about, (), choose.randint(0, 8)),
        Store(
            about,
            FilledSlots(
                tuple(slot + 4096 * at for at in range(len(chain))), (1,) * len(chain), (7,) * len(chain)
            ),
            choose.randint(0, 9),
        ),
        ReturnSlots((UnusedSlot(slot, choose.randrange(8)),)),
        Prefetch(about, time_us),
        Drop(ChainRef(_FUZZED, None), time_us),
        Stats(),
        Check(8, time_us),
        Flush(time_us),
        Ping(),
        Why(about, time_us),
        Demote(ChainRef(_FUZZED, None), time_us),
        ListNamespaces(),
        AskSizes(choose.choice((None, chain.namespace))),
        Exists(KeySet(chain.namespace, chain.keys), time_us),
        LeaseChain(about, time_us),
        MatchAndLease(about, time_us),
        Renew(lease),
        ReportDamage(about),
    ]


def spoilt(choose: random.Random, request_id: int) -> bytes:
    """A frame that is whole, or altered in its bytes, its length, its kind, or the values in its body."""
    data = bytearray(encode_message(choose.choice(requests(choose)), request_id))
    way = choose.randrange(8)
    if way < 3:
        for _ in range(choose.randint(1, 4)):
            data[choose.randrange(PREFIX_BYTES, len(data))] = choose.randrange(256)
    elif way == 3:
        data[choose.randrange(len(data))] = choose.randrange(256)
    elif way == 4:
        struct.pack_into("<H", data, 6, choose.choice((choose.randrange(30), choose.randrange(1 << 16))))
    elif way == 5:
        body = _values(choose, bytes(data[PREFIX_BYTES:]))
        data[PREFIX_BYTES:] = body
        struct.pack_into("<I", data, 16, len(body))
    elif way == 6:
        del data[choose.randrange(PREFIX_BYTES, len(data) + 1) :]
        struct.pack_into("<I", data, 16, len(data) - PREFIX_BYTES)
    return bytes(data)


def _values(choose: random.Random, body: bytes) -> bytes:
    values = list(msgpack.unpackb(body, raw=False, use_list=False, strict_map_key=False))
    if not values:
        values = [None]
    strange = [
        None,
        True,
        -1,
        0,
        2**64 - 1,
        2**63,
        "",
        "x" * 5000,
        b"",
        os.urandom(33),
        [],
        [[]],
        {},
        {"a": 1},
    ]
    if choose.random() < 0.2:
        values.insert(choose.randrange(len(values)), choose.choice(strange))
    elif choose.random() < 0.2:
        del values[choose.randrange(len(values))]
    else:
        values[choose.randrange(len(values))] = choose.choice(strange)
    packed: bytes = msgpack.packb(values)
    return packed


def whole(choose: random.Random, request_id: int) -> bytes:
    """A frame as a client sends it."""
    return encode_message(choose.choice(requests(choose)), request_id)


def main(path: str, num_frames: int, seed: int, make: Callable[[random.Random, int], bytes]) -> None:
    """Send frames over one connection after the other: each ends when the server ends it, or after some."""
    choose = random.Random(seed)
    sent = connections = 0
    while sent < num_frames:
        with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(ConnectionError, TimeoutError):
            sock.settimeout(30)
            sock.connect(path)
            connections += 1
            if choose.random() < 0.95:
                sock.sendall(encode_message(choose.choice((Hello, HelloReader))(os.getpid()), 0))
                sock.sendall(encode_message(OpenNamespace(NAMESPACE), 1))
                sock.recv(4096)
            for request_id in range(2, 2 + choose.randint(1, 100)):
                sent += 1
                time.sleep(_PAUSE_S)
                sock.sendall(make(choose, request_id))
                sock.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    while sock.recv(1 << 16):
                        pass
                    break
                sock.settimeout(30)
    sys.stdout.write(json.dumps({"frames": sent, "connections": connections}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), whole if len(sys.argv) > 4 else spoilt)
