"""``kvstore serve``: run a store until it is told to stop."""

import argparse
import asyncio
import contextlib
import json
import logging
import math
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.access_log import DEFAULT_MAX_BYTES, AccessLog
from kvstore.awake_selector import AwakeSelector
from kvstore.cli.size_argument import size_argument
from kvstore.cli.work_progress import progress_of_drain
from kvstore.config import Config, load_config, trace_settings
from kvstore.core_dumps import become_undumpable, leave_no_core_file
from kvstore.errors import InvalidConfig
from kvstore.garbage import HeapKeeper
from kvstore.kv_events import EventForm, HashForm
from kvstore.log_limit import LimitedTracebacks
from kvstore.running import serving
from kvstore.short_slices import ask_for_short_slices
from kvstore.trace_start import tracing
from kvstore.zmq_settings import ZmqSettings, media_words

if TYPE_CHECKING:
    from kvstore.trace_export import TraceCounters


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the command line's parser."""
    parser = subparsers.add_parser(
        "serve",
        help="run a store until it is told to stop",
        description="Run a store until SIGTERM or SIGINT, then finish what is under way. Exit status:"
        " 0 stopped as told, 2 bad configuration, or a tier or the socket cannot be used.",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file (default: $KVSTORE_CONFIG, else the defaults)"
    )
    parser.add_argument(
        "--access-log",
        metavar="FILE",
        help="write which blocks are asked for, under hashed names, for kvstore replay",
    )
    parser.add_argument(
        "--access-log-bytes",
        type=size_argument,
        default=DEFAULT_MAX_BYTES,
        metavar="SIZE",
        help="how large the file and the one before it, FILE.1, may become together (default: 1GiB)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON line when ready, and one when stopped"
    )
    parser.add_argument(
        "--prefill-tokens-per-s",
        metavar="N",
        type=_speed,
        default=0.0,
        help="speed of prefill of the engines beside the store, by which /metrics and policies estimate the"
        " time that hits save (default: no estimate)",
    )
    _add_event_options(parser)
    parser.set_defaults(run=run)


def _add_event_options(parser: argparse.ArgumentParser) -> None:
    options = parser.add_argument_group("where events are published")
    options.add_argument(
        "--events",
        metavar="ENDPOINT",
        help="publish there over ZeroMQ which blocks come and go, as vLLM does: tcp://HOST:PORT or ipc:///PATH"
        " (default: nowhere)",
    )
    options.add_argument(
        "--events-replay", metavar="ENDPOINT", default="", help="where missed events are asked for again"
    )
    options.add_argument(
        "--events-topic", metavar="TEXT", default="", help="topic they are published under (default: empty)"
    )
    options.add_argument(
        "--events-hashes",
        choices=[form.value for form in (HashForm.INT, HashForm.SIGNED, HashForm.BYTES)],
        default=HashForm.INT.value,
        help="how keys are told: their last 64 bits, without or with a sign, or their 32 bytes"
        " (default: %(default)s)",
    )
    options.add_argument(
        "--events-form",
        choices=[form.value for form in EventForm],
        default=EventForm.MAP.value,
        help="how an event is told: as a map, as vLLM does, or as an array, which llm-d reads"
        " (default: %(default)s)",
    )
    options.add_argument(
        "--events-media",
        metavar="TIER=WORD,...",
        default="",
        help="other words for tiers, which are called CPU (dram), STORAGE (ssd) and EXTERNAL (remote); of one"
        " with an empty word nothing is told",
    )
    options.add_argument(
        "--events-keys",
        metavar="FOLDER",
        type=Path,
        help="let in only clients with a CURVE certificate in its folder clients, and encrypt;"
        " server.key_secret is the server's own. Needed beyond this machine",
    )
    options.add_argument(
        "--events-open",
        action="store_true",
        help="let in whoever reaches the endpoint, beyond this machine too: for routers that have no keys,"
        " where the network keeps out everybody else",
    )


def _events(args: argparse.Namespace) -> ZmqSettings | None:
    if args.events is None:
        for name in ("replay", "topic", "keys", "media", "open"):
            if getattr(args, f"events_{name}"):
                raise InvalidConfig(f"--events-{name} needs --events")
        return None
    settings = ZmqSettings(
        args.events,
        args.events_replay,
        args.events_topic,
        HashForm(args.events_hashes),
        EventForm(args.events_form),
        args.events_keys,
        args.events_open,
        media_words(args.events_media) if args.events_media else {},
    )
    settings.check()
    return settings


def _speed(text: str) -> float:
    speed = float(text)
    if not 0 < speed < math.inf:
        raise ValueError("not a speed")
    return speed


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    config = load_config(args.config)
    events = _events(args)
    # A core dump would hold prompts, passwords and the tenants' salts.
    leave_no_core_file()
    if config.encryption is not None:
        become_undumpable()
    logging.basicConfig(
        level=config.server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    ask_for_short_slices()
    selector = AwakeSelector()
    with (
        LimitedTracebacks.installed(),
        tracing(trace_settings(), service="kvstore") as traces,
        asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner,
    ):
        runner.run(_serve(config, args, events, traces, selector=selector))
    return 0


def _access_log(args: argparse.Namespace) -> AccessLog | None:
    if args.access_log is None:
        return None
    return AccessLog(args.access_log, max_bytes=args.access_log_bytes)


async def _serve(
    config: Config,
    args: argparse.Namespace,
    events: ZmqSettings | None,
    traces: "TraceCounters | None",
    *,
    selector: AwakeSelector,
) -> None:
    as_json: bool = args.json
    loop = asyncio.get_running_loop()
    told_to_stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told_to_stop.set)
    socket_path = str(config.server.socket)
    async with contextlib.AsyncExitStack() as stack:
        store = serving(
            config,
            socket_path=socket_path,
            stay_awake=selector.stay_awake,
            idle_work=selector.idle_work,
            prefill_tokens_per_s=args.prefill_tokens_per_s,
            events=events,
            access_log=_access_log(args),
        )
        server = await stack.enter_async_context(store)
        server.counters.traces = None if traces is None else traces.as_dict
        keeper = HeapKeeper(server.num_ended_connections, idle_work=selector.idle_work)
        with keeper.keeping():
            ticks = asyncio.create_task(keeper.tick_forever(), name="heap-keeper")
            places = {"socket": socket_path} | ({} if server.http_url is None else {"http": server.http_url})
            _say("ready", f"kvstore: ready on {' and '.join(places.values())}", places, as_json=as_json)
            await told_to_stop.wait()
            ticks.cancel()
        async with progress_of_drain(server.store_stats):
            await stack.aclose()
    _say("stopped", "kvstore: stopped", places, as_json=as_json)


def _say(event: str, text: str, places: dict[str, str], *, as_json: bool) -> None:
    line = json.dumps({"event": event, **places, "pid": os.getpid()}) if as_json else text
    print(line, flush=True)
