"""An address of this machine that takes no connection and refuses none, as one behind a firewall does."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def black_hole(port: int = 0) -> Iterator[tuple[str, int]]:
    """Listen on 127.0.0.2 with a full backlog: further connections are neither taken nor refused."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.2", port))
        listener.listen(0)
        place = listener.getsockname()
        while True:
            waiting = stack.enter_context(socket.socket())
            waiting.settimeout(0.2)
            try:
                waiting.connect(place)
            except TimeoutError:
                break
        yield place
