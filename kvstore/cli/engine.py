"""``kvstore engine``: run the bundled inference engine, with or without a store."""

import argparse
import asyncio
import json
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.config import cache_folder, trace_settings
from kvstore.errors import KVStoreError
from kvstore.log_limit import LimitedTracebacks
from kvstore.records import MAX_TTL_S
from kvstore.secret_source import EXPECTED, SecretSource
from kvstore.trace_start import tracing

if TYPE_CHECKING:
    from kvstore_engine_adapter.serve_engine import ServeOptions


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the command line's parser."""
    parser = subparsers.add_parser(
        "engine",
        help="run the bundled inference engine",
        description="Serve a Llama-architecture model over HTTP to clients of OpenAI's API (chats,"
        " completions, responses) and of TGI's, reusing KV blocks from a store. Prints one JSON line with the"
        " URL on stdout when ready. SIGTERM ends it. Exit status: 0 ended by a signal, 1 failed, 2 usage or"
        " bad input.",
    )
    parser.add_argument("--model", type=Path, required=True, metavar="PATH", help="GGUF or model folder")
    parser.add_argument("--store", metavar="ADDRESS", help="address of a store (default: none)")
    parser.add_argument("--no-reuse", action="store_true", help="compute every prompt; keep no blocks at all")
    _add_doors(parser)
    parser.add_argument("--served-model-name", metavar="NAME", help="default: the model's own name")
    parser.add_argument(
        "--max-model-len",
        type=_whole(2),
        metavar="TOKENS",
        help="prompt and answer (default: what model and vram tier hold, up to 8192)",
    )
    parser.add_argument(
        "--max-num-seqs",
        type=_whole(1, 4096),
        default=32,
        help="requests that run at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--tensor-parallel-size",
        type=_whole(1, 1024),
        default=1,
        metavar="N",
        help="processes that share the model, each with its KV heads; on CUDA one per device (default:"
        " %(default)s)",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--kv-cache-bytes", type=_whole(1), metavar="BYTES", help="size of the vram tier")
    size.add_argument(
        "--num-blocks", type=_whole(1), help="size of the vram tier (default on a CPU: 4 full sequences)"
    )
    size.add_argument(
        "--gpu-memory-utilization",
        type=_ratio,
        metavar="RATIO",
        help="share of a CUDA device's memory that the engine, weights included, takes (default there: 0.9)",
    )
    parser.add_argument("--block-tokens", type=_whole(1, 65535), default=16, help="default: %(default)s")
    parser.add_argument(
        "--threads", type=_whole(1, 1024), default=1, help="torch threads (default: %(default)s)"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "fp8"),
        default="auto",
        help="what keys and values are kept as, in pages and in the store: as --dtype, or as float8 e4m3 in"
        " half the bytes of 16 bits, less exactly (default: %(default)s)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--attention-backend",
        choices=("exact", "fast", "flashinfer"),
        default="exact",
        help="with --device cuda: answers that are equal to the bit in any batch and after any reuse, or"
        " quicker decoding whose last bits vary, or that by FlashInfer (default: %(default)s)",
    )
    parser.add_argument(
        "--tenant-salt-file",
        type=Path,
        metavar="FILE",
        help="secret bytes that separate this tenant's blocks",
    )
    parser.add_argument(
        "--grace",
        type=_seconds,
        default=5.0,
        metavar="SECONDS",
        help="time for requests under way and unwritten blocks after SIGTERM (default: %(default)g)",
    )
    parser.add_argument(
        "--session-ttl",
        type=_seconds_of_session,
        default=86_400.0,
        metavar="SECONDS",
        help="how long sessions and responses stay after their last use (default: %(default)g)",
    )
    parser.add_argument(
        "--session-quota-bytes",
        type=_whole(1),
        default=64 << 20,
        metavar="BYTES",
        help="what the sessions and responses of one API key's tenant may take (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def _add_doors(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="an IP address; off loopback an API key and --tls-folder are required (default: %(default)s)",
    )
    parser.add_argument(
        "--port", type=_whole(0, 65535), default=8000, help="0: a free one (default: %(default)s)"
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="what clients must show; everybody on the machine can read it in the list of processes: rather"
        " set KVSTORE_ENGINE_API_KEY or give a file",
    )
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="file whose first line is the API key"
    )
    parser.add_argument(
        "--api-keys",
        type=_place,
        metavar="PLACE",
        help="file:/PATH or env:NAME of a keyring of kvstore keys: each tenant has sessions and blocks of its"
        " own",
    )
    parser.add_argument(
        "--tls-folder",
        type=Path,
        metavar="DIR",
        help="folder with tls.crt and tls.key, and ca.crt for mutual TLS",
    )


def run(args: argparse.Namespace) -> int:
    """Run the engine until a signal ends it."""
    # The engine's packages are an extra: the other commands work without them.
    try:
        from kvstore_engine_adapter.serve_engine import serve_engine
        from kvstore_engine_adapter.tensor_parallel.rank_group import RankLost
    except ImportError as error:
        return _complain(f"engine needs {error.name}: pip install 'tiered-kvstore[engine]'", 2)
    if args.store is not None and args.no_reuse:
        return _complain("engine: --store and --no-reuse exclude each other: leave one out", 2)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # A store that is back is as much news as one that is away; the rest of the engine's information is not.
    logging.getLogger("kvstore_engine_adapter.store_watch").setLevel(logging.INFO)
    # A large model's first start takes minutes here: its progress is worth a line.
    logging.getLogger("kvstore_engine_adapter.model_digest").setLevel(logging.INFO)
    try:
        with LimitedTracebacks.installed(), tracing(trace_settings(), service="kvstore-engine"):
            asyncio.run(serve_engine(_options(args), _announce))
    except RankLost as error:
        return _complain(str(error), 1)
    except KVStoreError as error:
        return _complain(str(error), 2)
    return 0


def _options(args: argparse.Namespace) -> "ServeOptions":
    # The engine's packages are an extra, see run().
    from kvstore_engine_adapter.device_pages import AttentionBackend
    from kvstore_engine_adapter.faces.engine_doors import DoorOptions
    from kvstore_engine_adapter.faces.record_access import SessionLimits
    from kvstore_engine_adapter.kv_dtype import KVCacheDtype
    from kvstore_engine_adapter.serve_engine import ServeOptions

    lower = []
    if args.store is not None:
        from kvstore_tiers.store import StoreTier  # loaded only where a store is used

        lower.append(StoreTier(args.store))
    return ServeOptions(
        model=args.model,
        store=args.store,
        doors=DoorOptions(
            host=args.host,
            port=args.port,
            api_key=args.api_key,
            api_key_file=args.api_key_file,
            api_keys=args.api_keys,
            tls_folder=args.tls_folder,
        ),
        session_limits=SessionLimits(ttl_s=args.session_ttl, quota_bytes=args.session_quota_bytes),
        served_model_name=args.served_model_name,
        max_model_tokens=args.max_model_len,
        kv_cache_bytes=args.kv_cache_bytes,
        num_blocks=args.num_blocks,
        gpu_memory_ratio=args.gpu_memory_utilization,
        max_num_seqs=args.max_num_seqs,
        tensor_parallel_size=args.tensor_parallel_size,
        block_tokens=args.block_tokens,
        threads=args.threads,
        dtype=args.dtype,
        device=args.device,
        attention_backend=AttentionBackend(args.attention_backend),
        kv_cache_dtype=KVCacheDtype(args.kv_cache_dtype),
        tenant_salt_file=args.tenant_salt_file,
        is_reusing=not args.no_reuse,
        grace_s=args.grace,
        lower=lower,
        cache_folder=cache_folder(),
    )


def _announce(event: dict[str, object]) -> None:
    print(json.dumps(event), flush=True)


def _complain(message: str, status: int) -> int:
    print(f"kvstore: {message}", file=sys.stderr)
    return status


def _whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """Return a reader of whole numbers within bounds; argparse names the option in its complaint."""
    wanted = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"

    def read(text: str) -> int:
        # int() also takes underscores, spaces and digits of other scripts; and thousands of digits slowly.
        is_plain = text.removeprefix("-").isdecimal() and text.isascii() and len(text) <= 20
        if not is_plain or int(text) < low or (high is not None and int(text) > high):
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not {wanted}")
        return int(text)

    return read


def _number(text: str, low: float, high: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no {what} from {low:g} to {high:.10g}")
    return value


def _seconds(text: str) -> float:
    return _number(text, 0, 3600, "number of seconds")


def _seconds_of_session(text: str) -> float:
    return _number(text, 1, MAX_TTL_S / 2, "number of seconds")


def _ratio(text: str) -> float:
    return _number(text, 0.01, 1, "share")


def _place(text: str) -> SecretSource:
    try:
        return SecretSource.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}: expected {EXPECTED}") from None
