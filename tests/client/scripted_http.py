"""A server on loopback that answers over HTTP what a test says."""

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server on loopback that treats each connection as ``answer`` says; gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    stream, _ = listener.accept()
                except OSError:
                    return
                with stream:
                    answer(stream)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def reply(body: bytes, *, status: int = 200, length: int | None = None) -> Callable[[socket.socket], None]:
    def answer(stream: socket.socket) -> None:
        name = requested(stream)
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body) if length is None else length}\r\n"
        stream.sendall(head.encode() + name + b"\r\n" + body)

    return answer


def requested(stream: socket.socket) -> bytes:
    """Receive a request whole; returns the line of its head that its answer must have too."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += stream.recv(1 << 16)
    head, _, body = received.partition(b"\r\n\r\n")
    length, named = (
        re.search(rb"Content-Length: (\d+)", head),
        re.search(rb"KVStore-Request: \w{16}\r\n", head + b"\r\n"),
    )
    assert named, "a request without a name"
    while length and len(body) < int(length[1]):
        body += stream.recv(1 << 16)
    return named[0]
