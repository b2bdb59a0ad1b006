"""A server that greets with a real arena, and then answers as a test says."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvstore.arena_view import open_read_only
from kvstore.messages import Answer, Done, OpenNamespace, Request, Welcome, decode_request, encode_message
from kvstore.wire import FrameDecoder
from kvstore_tiers.arena import Arena

Answering = Callable[[Request], Answer | None]
"""Returns what is answered to a request; None: nothing."""


class LyingServer:
    """Counts the connections that clients made, and those that they ended."""

    def __init__(self, arena: Arena, answer: Answering) -> None:
        self._arena = arena
        self._answer = answer
        self.num_connections = 0
        self.num_ended = 0

    def serve(self, stream: socket.socket) -> None:
        """Talk to one client until it ends the connection."""
        with stream, suppress(OSError):
            stream.recv(4096)
            welcome = encode_message(
                Welcome(self._arena.view.instance, self._arena.view.format.total_bytes, 32), 0
            )
            reading = open_read_only(self._arena.fd)
            socket.send_fds(stream, [welcome], [reading, self._arena.fd])
            socket.close(reading)
            decoder = FrameDecoder()
            while data := stream.recv(1 << 16):
                decoder.feed(data)
                while (frame := decoder.next_frame()) is not None:
                    request = decode_request(frame)
                    answer = Done() if isinstance(request, OpenNamespace) else self._answer(request)
                    if answer is not None:
                        stream.sendall(encode_message(answer, frame.request_id))
        self.num_ended += 1


@contextmanager
def lying_server(path: Path, answer: Answering) -> Iterator[LyingServer]:
    """Listen at a path until the block is left."""
    arena = Arena.create(1 << 20)
    server = LyingServer(arena, answer)
    threads: list[threading.Thread] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def accept() -> None:
            with suppress(OSError):
                while True:
                    stream, _ = listener.accept()
                    server.num_connections += 1
                    threads.append(threading.Thread(target=server.serve, args=(stream,), daemon=True))
                    threads[-1].start()

        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        yield server
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join()
    for thread in threads:
        thread.join(timeout=30)
    arena.close()
