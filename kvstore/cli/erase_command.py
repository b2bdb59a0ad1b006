"""``kvstore erase``: make everything that was stored for a tenant unreadable, on every node."""

import argparse
import json
import sys

from kvstore.cli.block_naming import MAX_SALT_BYTES, read_salt
from kvstore.cli.store_address import add_store_arguments, connected
from kvstore.errors import InvalidRequest
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
    who.add_argument("--salt", metavar="HEX", help="the tenant's salt in hex digits")
    who.add_argument("--salt-file", metavar="FILE", help="file that holds the tenant's salt")
    who.add_argument(
        "--namespace", metavar="DIGEST", help="digest in hex of a namespace of the tenant that is open now"
    )
    who.add_argument(
        "--public", action="store_true", help="what belongs to no tenant: namespaces without a salt"
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
    if report.leased_blocks:
        print(f"{report.leased_blocks} of them are leased: overwritten when their leases end")


def _tenant(args: argparse.Namespace) -> tuple[bytes, NamespaceDigest | None]:
    """Return the salt of the tenant that the arguments name, or a namespace of it."""
    given = [value for value in (args.salt, args.salt_file, args.namespace, args.public) if value]
    if len(given) != 1:
        raise InvalidRequest(
            "erase: name one tenant: by --salt, --salt-file or --namespace; or --public for what has none"
        )
    if args.namespace is not None:
        return b"", NamespaceDigest(_hex(args.namespace, "--namespace", low=KEY_BYTES, high=KEY_BYTES))
    if args.salt is not None:
        return _hex(args.salt, "--salt", low=1, high=MAX_SALT_BYTES), None
    return b"" if args.public else read_salt(args.salt_file), None


def _hex(text: str, argument: str, *, low: int, high: int) -> bytes:
    try:
        data = bytes.fromhex(text)
    except ValueError:
        data = b""
    if not low <= len(data) <= high:
        raise InvalidRequest(f"{argument}: expected {low} to {high} bytes in hex digits (value not shown)")
    return data
