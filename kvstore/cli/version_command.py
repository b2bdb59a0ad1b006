"""``kvstore version``: show the version of the product, its protocol and its formats."""

import argparse
import json

from kvstore import __version__, wire


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the command line's parser."""
    parser = subparsers.add_parser(
        "version", help="show the version", description="Show the version of the product and its protocol."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the version."""
    if args.json:
        print(json.dumps({"version": __version__, "protocol": wire.VERSION}))
    else:
        print(f"kvstore {__version__} (protocol {wire.VERSION})")
    return 0
