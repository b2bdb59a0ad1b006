"""ScriptedServer: a TCP server on loopback that answers as a test says, not as Redis would."""

import socket
import threading
from collections.abc import Callable, Iterable

Answer = Callable[[bytes], Iterable[bytes]]
"""Takes what came in one piece, and gives the pieces to send."""


class ScriptedServer:
    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.ended = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def stop(self) -> None:
        self.ended.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def every(self, seconds: float, piece: bytes) -> Iterable[bytes]:
        """Give the piece now and then, until the server is stopped."""
        while not self.ended.wait(seconds):
            yield piece

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(stream,)))
            self._threads[-1].start()

    def _serve(self, stream: socket.socket) -> None:
        stream.settimeout(30)
        try:
            while data := stream.recv(1 << 16):
                for piece in self._answer(data):
                    stream.sendall(piece)
        except OSError:
            return
        finally:
            stream.close()
