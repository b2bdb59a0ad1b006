"""``kvstore serve`` in a process that lets trouble come to its disk, and to its wall clock.

``python -m kvstore.drill.troubled_store --folder DIR --control SOCKET [--order JSON] serve ...`` runs it: the
command itself is what it always is. ``--probe`` instead of a command only sees whether that is possible here.

Operations are seen in the module ``os``, through which LMDB's own calls are led. Reads of the index are not
operations: LMDB maps its file.
"""

import argparse
import json
import runpy
import socket
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path

import lmdb

from kvstore.drill.lmdb_calls import LmdbCalls
from kvstore.drill.store_process import PartFailed
from kvstore.drill.trouble import Trouble, TroubleOrder
from kvstore.drill.troubled_os import TroubledOs

_LINE_BYTES = 65536


def main() -> None:
    """Prepare the process, and run the command in it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="")
    parser.add_argument("--control", default="")
    parser.add_argument("--order", default=TroubleOrder().to_json())
    parser.add_argument("--probe", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    trouble = Trouble(TroubleOrder.from_json(args.order))
    if args.probe:
        _probe(trouble)
        return
    _prepare(trouble, args.folder)
    _shift_clock(trouble)
    _listen(trouble, args.control)
    sys.argv = ["kvstore", *args.command]
    # By name: the drill is below the command line in the order of imports, and runs it as another would.
    runpy.run_module("kvstore.cli", run_name="__main__")


def _prepare(trouble: Trouble, folder: str) -> None:
    LmdbCalls().lead_to_os()
    TroubledOs(trouble, folder).install()


def _probe(trouble: Trouble) -> None:
    """Exit with a reason unless operations of LMDB are seen."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            _prepare(trouble, folder)
        except PartFailed as error:
            sys.exit(str(error))
        with lmdb.open(folder, map_size=1 << 20) as environment:
            before = trouble.status().num_operations
            with environment.begin(write=True) as transaction:
                transaction.put(b"k", b"v")
            if trouble.status().num_operations - before < 2:
                sys.exit("lmdb: its writes are not seen")


def _shift_clock(trouble: Trouble) -> None:
    """Have the wall clock follow orders."""
    seconds, nanoseconds = time.time, time.time_ns
    time.time = lambda: seconds() + trouble.clock_s
    time.time_ns = lambda: nanoseconds() + int(trouble.clock_s * 1e9)


def _listen(trouble: Trouble, path: str) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    Path(path).unlink(missing_ok=True)
    listener.bind(path)
    listener.listen()
    threading.Thread(target=_take_orders, args=(trouble, listener), name="trouble", daemon=True).start()


def _take_orders(trouble: Trouble, listener: socket.socket) -> None:
    """Answer each connection's one line, an order or nothing, with what has happened."""
    while True:
        connection, _ = listener.accept()
        with connection:
            line = connection.recv(_LINE_BYTES).decode().strip()
            status = trouble.take(TroubleOrder.from_json(line)) if line else trouble.status()
            connection.sendall(json.dumps(asdict(status)).encode())


if __name__ == "__main__":
    main()
