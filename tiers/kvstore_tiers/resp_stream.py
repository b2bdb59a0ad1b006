"""A socket to a Redis-protocol server, opened in bounded time; and RespFault, what becomes of it."""

import socket
import ssl
from collections.abc import Callable, Sequence

from kvstore_tiers.resp_address import AddressLookup, RespAddress, SocketAddress


class RespFault(Exception):
    """The connection is unusable and must be closed.

    ``silent_s`` is how long the server said nothing, for a timeout; None for anything else.
    """

    def __init__(self, reason: str, *, silent_s: float | None = None) -> None:
        super().__init__(reason)
        self.silent_s = silent_s

    @property
    def is_timeout(self) -> bool:
        """Whether time ran out, rather than something breaking."""
        return self.silent_s is not None


class LoginRefused(RespFault):
    """The server lets us not in, or wants a login first (``NOAUTH``); says what helps."""

    def __init__(self, code: str) -> None:
        if code == "NOAUTH":
            problem = "the server answers NOAUTH: it wants a login: set password"
        else:
            problem = f"the server refused the login: {code}: check username and password"
        super().__init__(f"{problem} in [tiers.remote]")


def open_stream(
    address: RespAddress,
    lookup: AddressLookup,
    *,
    deadline_s: float,
    clock: Callable[[], float],
    tls: ssl.SSLContext | None = None,
) -> socket.socket:
    """Connect until a deadline at most, name look-up and TLS handshake included.

    Raises:
        RespFault: no server, or not in time.
    """
    began_s = clock()
    stream: socket.socket | None = None
    try:
        stream = _connected(lookup.find(deadline_s - began_s), deadline_s, clock)
        if tls is not None:
            stream.settimeout(max(0.001, deadline_s - clock()))
            stream = tls.wrap_socket(stream, server_hostname=address.host)
    except TimeoutError as error:
        _close(stream)
        raise RespFault("connecting took too long", silent_s=clock() - began_s) from error
    except (OSError, ValueError) as error:
        # ValueError: a host that no resolver could take.
        _close(stream)
        raise RespFault(f"cannot connect: {_reason(error)}") from error
    return stream


def _connected(places: Sequence[SocketAddress], until_s: float, clock: Callable[[], float]) -> socket.socket:
    """Connect to the first address that takes it; each has its share of the time. Raises OSError."""
    failure: OSError = TimeoutError()
    for index, (family, where) in enumerate(places):
        left_s = until_s - clock()
        if left_s <= 0:
            raise TimeoutError
        stream = socket.socket(family, socket.SOCK_STREAM)
        try:
            stream.settimeout(left_s / (len(places) - index))
            stream.connect(where)
            if family != socket.AF_UNIX:
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            stream.close()
            failure = error
        else:
            return stream
    raise failure


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _close(stream: socket.socket | None) -> None:
    if stream is not None:
        stream.close()
