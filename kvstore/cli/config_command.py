"""``kvstore config``: check a configuration file and show what is in force."""

import argparse
import json
import sys

from kvstore.config import load_config
from kvstore.config_reference import configuration_reference, effective_json, effective_text
from kvstore.errors import InvalidConfig


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the command line's parser."""
    parser = subparsers.add_parser(
        "config",
        help="check a configuration file and show what is in force",
        description="Check a configuration file and show every key in force with its source. Secrets are"
        " never shown. Exit status: 0 valid, 2 not valid.",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file (default: $KVSTORE_CONFIG, else the defaults)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--reference", action="store_true", help="print the reference of all keys (Markdown)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the configuration; 0 if it is valid, 2 with one line on stderr if not."""
    if args.reference:
        print(configuration_reference(), end="")
        return 0
    try:
        config = load_config(args.config)
    except InvalidConfig as error:
        print(f"kvstore: {error}", file=sys.stderr)
        return 2
    print(
        json.dumps(effective_json(config)) if args.json else effective_text(config),
        end="\n" if args.json else "",
    )
    return 0
