"""``kvstore demo``: two nodes, three replicas, a real model, every tier shown and checked."""

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.config import cache_folder
from kvstore.errors import KVStoreError

if TYPE_CHECKING:
    from kvstore_engine_adapter.demo import DemoReport, PreparedDemo


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the command line's parser."""
    parser = subparsers.add_parser(
        "demo",
        help="run two nodes with a real model and check every tier",
        description="Start a Redis-protocol server, two stores and their inference replicas on this machine,"
        " ask questions about a long text, and check for every tier that the text was reused, that the"
        " answer is that of a replica without a store, and how much sooner it came. Ends all it started."
        " Exit status: 0 every expectation held, 1 one did not or a part failed, 2 usage.",
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object on stdout")
    parser.add_argument(
        "--model", type=Path, metavar="PATH", help="GGUF file or Hugging Face folder (default: fetched)"
    )
    parser.add_argument(
        "--document", type=Path, metavar="FILE", help="text of 800 tokens or more (default: bundled)"
    )
    parser.add_argument("--questions", type=Path, metavar="FILE", help="five or more questions, one per line")
    parser.add_argument("--keep", action="store_true", help="keep configurations and logs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo; progress goes to stderr, the result to stdout."""
    # The engine's packages are an extra: the other commands work without them.
    try:
        from kvstore_engine_adapter.demo.report import report_table
    except ImportError as error:
        print(
            f"kvstore: demo needs {error.name}: pip install 'tiered-kvstore[engine,server,demo]'",
            file=sys.stderr,
        )
        return 2
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - started:5.1f} s] {line}", file=sys.stderr, flush=True)

    try:
        prepared = _prepared(args, say)
    except KVStoreError as error:
        print(f"kvstore: {error}", file=sys.stderr)
        return 2
    outcome = asyncio.run(_run_until_signalled(prepared, say))
    if isinstance(outcome, signal.Signals):
        print(f"kvstore: demo: ended by {outcome.name}; so is everything it started", file=sys.stderr)
        return 128 + outcome
    print(report_table(outcome), file=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(json.dumps(outcome.to_json()))
    return 0 if outcome.is_ok else 1


def _prepared(args: argparse.Namespace, say: Callable[[str], None]) -> "PreparedDemo":
    # The engine's packages are an extra, see run().
    from kvstore_engine_adapter.demo import DemoSettings, prepare_demo
    from kvstore_engine_adapter.demo.texts import load_texts
    from kvstore_engine_adapter.model_fetch import fetch_model

    texts = load_texts(args.document, args.questions)
    model = args.model or fetch_model(cache_folder() / "models", say=say)
    return prepare_demo(DemoSettings(model=model, texts=texts, keep=args.keep))


async def _run_until_signalled(
    prepared: "PreparedDemo", say: Callable[[str], None]
) -> "DemoReport | signal.Signals":
    """Run the demo; the first signal ends it in order, further ones do not disturb that."""
    from kvstore_engine_adapter.demo import run_demo  # an extra, see run()

    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    received: list[signal.Signals] = []

    def end(number: signal.Signals) -> None:
        if not received:
            received.append(number)
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end, number)
    try:
        return await run_demo(prepared, say)
    except asyncio.CancelledError:
        if not received:
            raise
        return received[0]
