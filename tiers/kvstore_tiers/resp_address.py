"""RespAddress: where a Redis-protocol server listens and how to log in; and its name looked up in time."""

import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as LookupTimeout
from dataclasses import dataclass, field, replace
from urllib.parse import unquote, urlsplit

from kvstore.errors import InvalidConfig

_DEFAULT_PORT = 6379
_PATH_MAX_BYTES = 107


@dataclass(frozen=True, slots=True)
class RespAddress:
    """Parsed form of ``redis://[user:password@]host:port/db``, ``rediss://...`` or ``unix://path``."""

    host: str
    port: int
    path: str
    db: int
    is_tls: bool
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)

    @classmethod
    def parse(cls, url: str, *, user: str = "", password: str = "") -> "RespAddress":
        """Return the address in a URL; ``user`` and ``password`` take precedence over those in the URL.

        Raises:
            InvalidConfig: another scheme, or a part that is missing or wrong. Never quotes the credentials.
        """
        try:
            parts = urlsplit(url)
            port = parts.port or _DEFAULT_PORT
        except ValueError as error:
            raise InvalidConfig(f"remote: the url has a bad port or host: {_EXPECTED}") from error
        user = user or unquote(parts.username or "")
        secret = password or unquote(parts.password or "")
        if parts.scheme == "unix":
            path = unquote(parts.path)
            if not path.startswith("/") or len(path.encode()) > _PATH_MAX_BYTES:
                raise InvalidConfig(
                    f"remote: the url's socket path must be absolute and at most {_PATH_MAX_BYTES} bytes long"
                )
            db = parts.query.removeprefix("db=") if parts.query else "0"
            return cls("", 0, path, _database(db), is_tls=False, user=user, password=secret)
        if parts.scheme not in {"redis", "rediss"} or not parts.hostname:
            raise InvalidConfig(f"remote: the url names no server: {_EXPECTED}")
        db = parts.path.strip("/") or "0"
        is_tls = parts.scheme == "rediss"
        return cls(parts.hostname, port, "", _database(db), is_tls=is_tls, user=user, password=secret)

    def at(self, host: str, port: int) -> "RespAddress":
        """Return the address of another server that is logged in to in the same way."""
        return replace(self, host=host, port=port, path="")

    def __str__(self) -> str:
        """Return the address for messages, without credentials."""
        if self.path:
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.is_tls else 'redis'}://{host}:{self.port}/{self.db}"


_EXPECTED = "expected redis://host:port/db, rediss://host:port/db or unix:///path"

SocketAddress = tuple[socket.AddressFamily, tuple[str, int] | tuple[str, int, int, int] | str]
"""Family and address as ``socket.connect`` takes them."""


class AddressLookup:
    """Looks the server's name up in a thread of its own, since the system's resolver knows no deadline.

    Safe in threads.
    """

    def __init__(self, address: RespAddress) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._pending: Future[list[SocketAddress]] | None = None

    def find(self, timeout_s: float) -> list[SocketAddress]:
        """Return where to connect to, the best address first.

        Raises:
            TimeoutError: no answer in time; the look-up goes on for the next call.
            OSError: there is no such host.
        """
        if self._address.path:
            return [(socket.AF_UNIX, self._address.path)]
        try:
            return self._resolve(socket.AI_NUMERICHOST)
        except socket.gaierror:
            pending = self._start()
        try:
            return pending.result(timeout=max(0.0, timeout_s))
        except LookupTimeout as error:
            raise TimeoutError("looking the name up took too long") from error
        finally:
            with self._lock:
                if pending.done() and self._pending is pending:
                    self._pending = None

    def close(self) -> None:
        """Let go of the thread, without waiting for a look-up under way."""
        with self._lock:
            if self._executor is not None:
                self._executor.shutdown(wait=False, cancel_futures=True)
                self._executor = None

    def _start(self) -> "Future[list[SocketAddress]]":
        """Return the look-up under way, or begin one."""
        with self._lock:
            if self._pending is None:
                if self._executor is None:
                    self._executor = ThreadPoolExecutor(1, thread_name_prefix="kvstore-lookup")
                self._pending = self._executor.submit(self._resolve, 0)
            return self._pending

    def _resolve(self, flags: int) -> list[SocketAddress]:
        found = socket.getaddrinfo(
            self._address.host, self._address.port, type=socket.SOCK_STREAM, flags=flags
        )
        return [(family, where) for family, _, _, _, where in found]  # type: ignore[misc]  # AF_INET, AF_INET6


def _database(text: str) -> int:
    if not text.isdigit():
        raise InvalidConfig(f"remote: the url's database is {text!r}, expected a number")
    return int(text)
