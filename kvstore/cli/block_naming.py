"""The arguments by which commands name blocks: model, tokens and layout."""

import argparse
import json
from pathlib import Path

from kvstore.client import KVStore
from kvstore.errors import InvalidRequest, InvalidTokens
from kvstore.keys import KEY_BYTES, Namespace, NamespaceDigest, PrefixChain
from kvstore.layout import DTYPE_BYTES, KVLayout

_MAX_TOKENS_FILE_BYTES = 256 << 20
MAX_SALT_BYTES = 4096
_SHAPE = ("dtype", "layers", "kv_heads", "head_dim")


def add_naming_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name blocks."""
    names = parser.add_argument_group("which blocks")
    names.add_argument("--model", required=True, help="the model's name")
    tokens = names.add_mutually_exclusive_group(required=True)
    tokens.add_argument("--tokens", metavar="1,2,3", help="token ids, separated by commas")
    tokens.add_argument(
        "--tokens-file", metavar="FILE", help="token ids: a JSON list, or separated by white space"
    )
    names.add_argument("--block-tokens", type=int, default=16, help="tokens per block (default: %(default)d)")
    names.add_argument("--weights", default="", help="digest or revision of the weights")
    names.add_argument("--adapter", default="", help="digest of the adapter")
    names.add_argument("--salt-file", metavar="FILE", help="file that holds the tenant's salt")
    names.add_argument("--epoch", type=int, default=0, help="epoch of the namespace (default: %(default)d)")
    layout = parser.add_argument_group("what a block looks like: its bytes, or its shape")
    layout.add_argument("--block-bytes", type=int, help="bytes of a block whose inner shape does not matter")
    layout.add_argument("--dtype", choices=sorted(DTYPE_BYTES), help="element type")
    layout.add_argument("--layers", type=int, help="layers")
    layout.add_argument("--kv-heads", type=int, help="KV heads")
    layout.add_argument("--head-dim", type=int, help="elements per head")


def read_blocks(args: argparse.Namespace) -> tuple[Namespace, PrefixChain]:
    """Return the namespace and the chain that the arguments name.

    Raises:
        InvalidRequest, InvalidLayout, InvalidTokens: they name none: message with argument and remedy.
        OSError: a file cannot be read.
    """
    namespace = Namespace(
        model=args.model,
        layout=_layout(args),
        weights=args.weights,
        adapter=args.adapter,
        tenant_salt=b"" if args.salt_file is None else read_salt(args.salt_file),
        epoch=args.epoch,
    )
    tokens = read_tokens(args)
    chain = namespace.chain(tokens)
    if not len(chain):
        raise InvalidRequest(
            f"tokens: {len(tokens)} make no full block of {args.block_tokens}: lower --block-tokens"
        )
    return namespace, chain


def _layout(args: argparse.Namespace) -> KVLayout:
    given = [name for name in _SHAPE if getattr(args, name) is not None]
    if args.block_bytes is not None:
        if given:
            raise InvalidRequest("--block-bytes stands for itself: leave out --dtype and the shape")
        return KVLayout.opaque(block_bytes=args.block_bytes, block_tokens=args.block_tokens)
    missing = [f"--{name.replace('_', '-')}" for name in _SHAPE if name not in given]
    if missing:
        raise InvalidRequest(f"layout: give --block-bytes, or also {', '.join(missing)}")
    return KVLayout(
        dtype=args.dtype,
        num_layers=args.layers,
        block_tokens=args.block_tokens,
        num_kv_heads=args.kv_heads,
        head_dim=args.head_dim,
    )


def read_salt(path: str) -> bytes:
    """Return the tenant's salt that a file holds.

    Raises:
        InvalidRequest: it is empty or too long.
        OSError: it cannot be read.
    """
    with Path(path).open("rb") as file:
        salt = file.read(MAX_SALT_BYTES + 1)
    if not salt or len(salt) > MAX_SALT_BYTES:
        raise InvalidRequest(f"{path}: a salt has 1 to {MAX_SALT_BYTES} bytes")
    return salt


def read_digest(text: str) -> NamespaceDigest:
    """Return the digest that an argument ``--namespace`` names.

    Raises:
        InvalidRequest: it is none.
    """
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != KEY_BYTES:
        raise InvalidRequest(f"--namespace: expected {2 * KEY_BYTES} hex digits, a namespace's digest")
    return NamespaceDigest(digest)


def opened(client: KVStore, namespace: Namespace, args: argparse.Namespace) -> tuple[Namespace, PrefixChain]:
    """Open a namespace and return it as this caller must use it, with the chain of the tokens in it.

    Raises:
        KVStoreError: as ``KVStore.open_namespace`` and ``read_tokens``.
    """
    ours = client.open_namespace(namespace)
    return ours, ours.chain(read_tokens(args))


def read_tokens(args: argparse.Namespace) -> list[int]:
    """Return the tokens that the arguments name; a file is read once, it may be a pipe.

    Raises:
        InvalidRequest, InvalidTokens: they are no list of integers.
        OSError: a file cannot be read.
    """
    if not hasattr(args, "token_list"):
        args.token_list = _tokens(args)
    found: list[int] = args.token_list
    return found


def _tokens(args: argparse.Namespace) -> list[int]:
    if args.tokens is not None:
        return _integers(args.tokens.split(","), "--tokens")
    path = Path(args.tokens_file)
    with path.open("rb") as file:
        data = file.read(_MAX_TOKENS_FILE_BYTES + 1)
    if len(data) > _MAX_TOKENS_FILE_BYTES:
        raise InvalidRequest(f"{path}: larger than {_MAX_TOKENS_FILE_BYTES} bytes: not a list of tokens")
    try:
        text = data.decode()
        if not text.lstrip().startswith("["):
            return _integers(text.split(), str(path))
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidTokens(f"{path}: neither a JSON list nor integers separated by white space") from error
    if any(type(value) is not int for value in values):
        raise InvalidTokens(f"{path}: the JSON list holds something that is no integer")
    return list(values)


def _integers(words: list[str], where: str) -> list[int]:
    try:
        return [int(word) for word in words]
    except ValueError as error:
        raise InvalidTokens(f"{where}: not a list of integers: {error}") from error
