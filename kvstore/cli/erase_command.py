"""``kvstore erase``: make everything that was stored for a tenant unreadable, on every node."""

import argparse
import json
import sys
from pathlib import Path

from kvstore.auth import Keyring, require_name
from kvstore.cli.block_naming import MAX_SALT_BYTES, read_salt
from kvstore.cli.store_address import add_store_arguments, connected
from kvstore.config import load_config
from kvstore.errors import InvalidRequest
from kvstore.keyring_file import read_keyring
from kvstore.keys import KEY_BYTES, NamespaceDigest
from kvstore.results import EraseReport


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the command line's parser."""
    parser = subparsers.add_parser(
        "erase",
        help="destroy a tenant's key, so that nothing stored for it can be read again",
        description="Destroy the key that a tenant's blocks on ssd and remote are encrypted with, on every"
        " node, and overwrite its blocks in memory. Needs [encryption] in the server's configuration. Exit"
        " status: 0 the key is gone everywhere, 1 not everywhere yet, 2 bad input, 3 no server.",
    )
    who = parser.add_argument_group("which tenant: one of these")
    who.add_argument(
        "tenant", metavar="TENANT", nargs="?", help="name of a tenant of API keys, whose salt follows from it"
    )
    who.add_argument("--salt", metavar="HEX", help="the tenant's salt in hex digits")
    who.add_argument("--salt-file", metavar="FILE", help="file that holds the tenant's salt")
    who.add_argument(
        "--namespace", metavar="DIGEST", help="digest in hex of a namespace of the tenant that is open now"
    )
    who.add_argument(
        "--public", action="store_true", help="what belongs to no tenant: namespaces without a salt"
    )
    keys = parser.add_argument_group("where the API keys are, for a tenant by its name")
    keys.add_argument("--api-keys", metavar="FILE", type=Path, help="the file that kvstore keys makes")
    keys.add_argument(
        "--config",
        metavar="FILE",
        help="the server's TOML file, which names them (default: $KVSTORE_CONFIG, else the defaults)",
    )
    add_store_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Erase a tenant and print what came of it."""
    salt, namespace = _tenant(args)
    with connected(args) as client:
        report = client.erase_tenant(salt) if namespace is None else client.erase_tenant_of(namespace)
    _show(report, as_json=args.json)
    return 0 if report.is_complete else 1


def _show(report: EraseReport, *, as_json: bool) -> None:
    for problem in report.problems:
        print(f"kvstore: not erased everywhere yet, it is tried on: {problem}", file=sys.stderr)
    if as_json:
        print(json.dumps(report.as_dict()))
        return
    print(f"{report.keys} keys destroyed")
    for tier, count in sorted(report.blocks.items()):
        print(f"{count} blocks forgotten in {tier}")
    print(f"{report.records} records removed")
    if report.leased_blocks:
        print(f"{report.leased_blocks} of them are leased: overwritten when their leases end")


def _tenant(args: argparse.Namespace) -> tuple[bytes, NamespaceDigest | None]:
    """Return the salt of the tenant that the arguments name, or a namespace of it."""
    ways = (args.tenant, args.salt, args.salt_file, args.namespace, args.public)
    if sum(bool(way) for way in ways) != 1:
        raise InvalidRequest(
            "erase: name one tenant: TENANT, --salt, --salt-file or --namespace; --public for what has none"
        )
    if args.tenant is not None:
        return _salt_of(args.tenant, args), None
    if args.namespace is not None:
        return b"", NamespaceDigest(_hex(args.namespace, "--namespace", low=KEY_BYTES, high=KEY_BYTES))
    if args.salt is not None:
        return _hex(args.salt, "--salt", low=1, high=MAX_SALT_BYTES), None
    return b"" if args.public else read_salt(args.salt_file), None


def _salt_of(tenant: str, args: argparse.Namespace) -> bytes:
    """Return the salt that follows from a tenant's name and the secret of the API keys."""
    require_name(tenant, "tenant")
    keyring = _keyring(args)
    if tenant not in {record.tenant for record in keyring.records}:
        print(f"kvstore: no API key is of tenant {tenant} now", file=sys.stderr)
    return keyring.salt(tenant)


def _keyring(args: argparse.Namespace) -> Keyring:
    if args.api_keys is not None:
        return read_keyring(args.api_keys)
    config = load_config(args.config)
    if config.http is None or config.http.api_keys is None:
        raise InvalidRequest(
            f"erase: {config.source} names no API keys, from which a tenant's salt follows: give --api-keys,"
            " or the server's --config"
        )
    return Keyring.parse(config.http.read_api_keys(), source=str(config.http.api_keys))


def _hex(text: str, argument: str, *, low: int, high: int) -> bytes:
    try:
        data = bytes.fromhex(text)
    except ValueError:
        data = b""
    if not low <= len(data) <= high:
        raise InvalidRequest(f"{argument}: expected {low} to {high} bytes in hex digits (value not shown)")
    return data
