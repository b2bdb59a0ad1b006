"""ReplyProxy: a TCP relay on loopback that changes what the server answers."""

import socket
import threading
from collections.abc import Callable

Mangle = Callable[[bytes], bytes | None]
"""Takes each piece the server sent; returns what goes on to the client, None to cut the connection."""


def pass_on(data: bytes) -> bytes | None:
    """Change nothing."""
    return data


class ReplyProxy:
    """Relays connections to a server on loopback; ``mangle`` may be exchanged at any time."""

    def __init__(self, port: int) -> None:
        self.mangle: Mangle = pass_on
        self.num_connections = 0
        self._server_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        """Its address over TCP."""
        return f"redis://127.0.0.1:{self.port}/0"

    def stop(self) -> None:
        """Stop listening and cut every connection."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for stream in list(self._sockets):
            self._cut(stream)
        for thread in self._threads:
            thread.join()
        for stream in self._sockets:
            stream.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._server_port))
            except OSError:
                client.close()
                continue
            self.num_connections += 1
            self._sockets += [client, server]
            for source, target, is_reply in ((client, server, False), (server, client, True)):
                thread = threading.Thread(target=self._relay, args=(source, target, is_reply), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _relay(self, source: socket.socket, target: socket.socket, is_reply: bool) -> None:
        try:
            while data := source.recv(1 << 20):
                sent = self.mangle(data) if is_reply else data
                if sent is None:
                    break
                target.sendall(sent)
        except OSError:
            return
        finally:
            self._cut(source)
            self._cut(target)

    @staticmethod
    def _cut(stream: socket.socket) -> None:
        try:
            stream.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
