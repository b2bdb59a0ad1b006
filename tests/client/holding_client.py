"""A client process that takes a lease or reserves slots, says so, and waits to be killed."""

import sys
import time
from pathlib import Path

from kvstore.arena_link import ArenaCache
from kvstore.keys import PrefixChain
from kvstore.link import Link, unix_dial
from kvstore.messages import ChainRef, Fetch, OpenNamespace, Reserve
from tests.client.conftest import NAMESPACE


def main(socket_path: str, what: str) -> None:
    deadline_s = time.monotonic() + 30
    link = Link.open(unix_dial(Path(socket_path)), ArenaCache(), deadline_s)
    link.ask(OpenNamespace(NAMESPACE), deadline_s)
    chain: PrefixChain = NAMESPACE.chain(range(32))
    request = {"lease": Fetch, "slots": Reserve}[what](ChainRef(chain), 1_000_000)
    sys.stdout.write(f"{type(link.ask(request, deadline_s)).__name__}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
