"""``kvstore keys``: make and change the file of API keys."""

import argparse
import json
import sys
from pathlib import Path

from kvstore.auth import Scope, read_scopes
from kvstore.keyring_file import add_key, create_keyring, read_keyring, remove_key, write_salt


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the command line's parser."""
    parser = subparsers.add_parser(
        "keys",
        help="make and change the file of API keys",
        description="Make and change the file that api_keys of [http] names. A running server takes up the"
        " change within seconds. A key's text is printed once, by add, and kept nowhere. Exit status:"
        " 0 done, 2 the file cannot be used, or a name is taken, malformed or unknown.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    init = _action(actions, "init", "Make a file, mode 0600, with a new secret and no keys.")
    init.set_defaults(run=_init)

    add = _action(actions, "add", "Add a key and print its text, once.")
    add.add_argument("name", metavar="NAME", help="name of the key, unique in the file")
    add.add_argument("--tenant", metavar="TENANT", required=True, help="whose blocks the key gives access to")
    add.add_argument(
        "--scopes",
        metavar="SCOPES",
        default="read,write",
        help=f"what it allows, joined by commas: {', '.join(scope.value for scope in Scope)}"
        " (default: read,write)",
    )
    add.add_argument("--json", action="store_true", help="print one JSON object")
    add.set_defaults(run=_add)

    listing = _action(actions, "list", "List the keys: name, tenant, scopes.")
    listing.add_argument("--json", action="store_true", help="print one JSON object")
    listing.set_defaults(run=_list)

    remove = _action(actions, "remove", "Remove a key: nobody gets in with it again.")
    remove.add_argument("name", metavar="NAME", help="name of the key")
    remove.set_defaults(run=_remove)

    salt = _action(actions, "salt", "Write a tenant's salt to a new file, for engines on the Unix socket.")
    salt.add_argument("tenant", metavar="TENANT", help="the tenant, of which there is a key")
    salt.add_argument("out", metavar="OUT", type=Path, help="the new file, mode 0600")
    salt.set_defaults(run=_salt)


def _action(
    actions: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, description: str
) -> argparse.ArgumentParser:
    parser = actions.add_parser(
        name, help=description[0].lower() + description[1:-1], description=description
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="the file of keys")
    return parser


def _init(args: argparse.Namespace) -> int:
    create_keyring(args.file)
    print(f"made {args.file}: add keys with kvstore keys add {args.file} NAME --tenant TENANT")
    return 0


def _add(args: argparse.Namespace) -> int:
    scopes = read_scopes(args.scopes)
    key = add_key(args.file, args.name, tenant=args.tenant, scopes=scopes)
    if args.json:
        print(json.dumps({"name": args.name, "tenant": args.tenant, "scopes": _words(scopes), "key": key}))
    else:
        print(key)
        print("kvstore: this text of the key is not shown again", file=sys.stderr)
    return 0


def _list(args: argparse.Namespace) -> int:
    records = read_keyring(args.file).records
    if args.json:
        keys = [
            {"name": record.name, "tenant": record.tenant, "scopes": _words(record.scopes)}
            for record in records
        ]
        print(json.dumps({"keys": keys}))
        return 0
    for record in records:
        print(f"{record.name}  tenant {record.tenant}  scopes {','.join(_words(record.scopes))}")
    return 0


def _remove(args: argparse.Namespace) -> int:
    remove_key(args.file, args.name)
    print(f"removed {args.name}")
    return 0


def _salt(args: argparse.Namespace) -> int:
    write_salt(args.file, args.tenant, args.out)
    print(f"made {args.out}: name it with --tenant-salt-file or --salt-file")
    return 0


def _words(scopes: frozenset[Scope]) -> list[str]:
    return [scope.value for scope in Scope if scope in scopes]
