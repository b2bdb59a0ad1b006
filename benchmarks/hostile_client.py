"""A process that sends spoilt frames or requests to a store, at a stated rate: part of ``healthy_tail.py``.

``python hostile_client.py KIND ADDRESS RATE SECONDS``: KIND is ``frames``, ``whole_frames``, ``http``,
``whole_http``, or ``nothing``, which sends nothing and keeps a core busy all the same; RATE is a number a
second, 0 for as many as go. What it sends is made before it says ``ready``; it begins with the next line on
its standard input, and ends with a line of JSON: what it sent, over how many connections, and the CPU seconds
that took it.
"""

import json
import os
import random
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.keys import Namespace
from kvstore.layout import KVLayout
from kvstore.messages import (
    ChainRef,
    Check,
    Exists,
    Fetch,
    Hello,
    KeySet,
    LeaseChain,
    Match,
    OpenNamespace,
    Ping,
    Release,
    Request,
    Reserve,
    Stats,
    Why,
    encode_message,
)
from kvstore.wire import PREFIX_BYTES

SPACE = Namespace("hostile", KVLayout.opaque(block_bytes=4096, block_tokens=4))
POOL = 3000


def whole_frame(choose: random.Random) -> bytes:
    """A frame as a client sends it."""
    about = ChainRef(SPACE.chain(range(64))[: choose.randint(0, 8)])
    requests: list[Request] = [
        OpenNamespace(SPACE),
        Match(about, 1000),
        Fetch(about, 1000),
        Reserve(about, 1000),
        LeaseChain(about, 1000),
        Exists(KeySet(SPACE.digest, about.chain.keys), 1000),
        Why(about, 1000),
        Check(8, 1000),
        Stats(),
        Ping(),
        Release(choose.randrange(1 << 16)),
    ]
    return encode_message(choose.choice(requests), choose.randrange(2, 1 << 30))


def spoilt_frame(choose: random.Random) -> bytes:
    """A frame with other bytes in its body or prefix, another kind, or cut short."""
    data = bytearray(whole_frame(choose))
    way = choose.randrange(6)
    if way < 3 and len(data) > PREFIX_BYTES:
        for _ in range(choose.randint(1, 4)):
            data[choose.randrange(PREFIX_BYTES, len(data))] = choose.randrange(256)
    elif way == 3:
        data[choose.randrange(PREFIX_BYTES)] = choose.randrange(256)
    elif way == 4:
        struct.pack_into("<H", data, 6, choose.randrange(1 << 16))
    else:
        del data[choose.randrange(PREFIX_BYTES, len(data) + 1) :]
        struct.pack_into("<I", data, 16, len(data) - PREFIX_BYTES)
    return bytes(data)


def whole_request(choose: random.Random) -> bytes:
    """An HTTP request as a client sends it."""
    chain = SPACE.chain(range(64))[: choose.randint(1, 8)]
    about = {"namespace": SPACE.digest.hex(), "keys": [key.hex() for key in chain.keys]}
    path = choose.choice(["/v1/match", "/v1/exists", "/v1/why", "/v1/leases", "/v1/prefetch"])
    body = json.dumps(about).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def spoilt_request(choose: random.Random) -> bytes:
    """An HTTP request with bytes changed, cut out, doubled or put in."""
    data = bytearray(whole_request(choose))
    for _ in range(choose.randint(1, 4)):
        at = choose.randrange(min(len(data), 300))
        way = choose.randrange(4)
        if way == 0:
            data[at:at] = choose.choice(
                [b"\r\n", b"\0", b"Transfer-Encoding: chunked\r\n", b"HTTP/9", b"%00"]
            )
        elif way == 1:
            del data[at : at + choose.choice([1, 10, 100])]
        elif way == 2:
            data[at] = choose.randrange(256)
        else:
            data[at:at] = data[at : at + choose.choice([1, 10, 100])]
    return bytes(data)


def greeted(address: str) -> socket.socket:
    """A connection over the Unix socket, greeted."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(5)
    sock.connect(address)
    sock.sendall(encode_message(Hello(os.getpid()), 0) + encode_message(OpenNamespace(SPACE), 1))
    sock.recv(4096)
    return sock


def over_tcp(address: str) -> socket.socket:
    """A connection to the HTTP port."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5)


Make = Callable[[random.Random], bytes]
KINDS: dict[str, tuple[Make, Callable[[str], socket.socket]]] = {
    "frames": (spoilt_frame, greeted),
    "whole_frames": (whole_frame, greeted),
    "http": (spoilt_request, over_tcp),
    "whole_http": (whole_request, over_tcp),
}


@dataclass
class Sender:
    """Sends over one connection after the other: each ends when the server ends it, or after some."""

    connect: Callable[[], socket.socket]
    choose: random.Random
    sock: socket.socket | None = None
    left: int = 0
    sent: int = 0
    connections: int = 0

    def send(self, data: bytes) -> None:
        """Send one, and throw away what was answered until now."""
        try:
            if self.sock is None:
                self.sock, self.left = self.connect(), self.choose.randint(1, 100)
                self.connections += 1
            self.sock.settimeout(5)
            self.sock.sendall(data)
            self.sent += 1
            self.left -= 1
            if self.left and not self._has_ended(self.sock):
                return
        except OSError:
            time.sleep(0.001)
        if self.sock is not None:
            self.sock.close()
            self.sock = None

    def _has_ended(self, sock: socket.socket) -> bool:
        sock.setblocking(False)
        try:
            while sock.recv(1 << 16):
                pass
        except BlockingIOError:
            return False
        return True


def main(kind: str, address: str, rate: float, seconds: float) -> None:
    """Send at the rate for some seconds."""
    choose = random.Random(7)
    make, connect = KINDS.get(kind, KINDS["frames"])
    pool = [make(choose) for _ in range(POOL)]
    sender = Sender(lambda: connect(address), choose)
    print("ready", flush=True)
    sys.stdin.readline()
    began_s, before = time.monotonic(), os.times()
    while (took_s := time.monotonic() - began_s) < seconds:
        if kind == "nothing":
            sum(range(1000))
        elif rate and sender.sent >= took_s * rate:
            time.sleep(0.0005)
        else:
            sender.send(pool[sender.sent % POOL])
    after = os.times()
    cpu_s = after.user + after.system - before.user - before.system
    print(json.dumps({"sent": sender.sent, "connections": sender.connections, "cpu_s": round(cpu_s, 2)}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
