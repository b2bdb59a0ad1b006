"""``kvstore records``: list, read, store and forget records."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from kvstore.cli.block_naming import read_salt
from kvstore.cli.output_file import remove_output, replace_output
from kvstore.cli.store_address import add_store_arguments, connected
from kvstore.client import KVStore
from kvstore.errors import InvalidRequest, KVStoreError, TierUnavailable
from kvstore.records import MAX_LISTED_RECORDS, MAX_RECORD_BYTES, RecordInfo, RecordOutcome, RecordWrite

_END_UNKNOWN = 3


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the command line's parser."""
    parser = subparsers.add_parser(
        "records",
        help="list, read, store and forget records",
        description="List, read, store and forget records: small named values beside the blocks, kept until"
        " their time is over. Exit status: 0 done, 1 there is none, or it was not stored, 2 bad input,"
        " 3 no server, or it is not known.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    listing = _action(actions, "list", "List the records of a collection by name.")
    listing.add_argument("--prefix", default="", metavar="TEXT", help="only names that begin with it")
    listing.add_argument("--limit", type=int, metavar="COUNT", help="records to list at most (default: all)")
    listing.set_defaults(run=_unless_unknown(_list))

    get = _action(actions, "get", "Write the value of a record to a file, or to stdout.", is_named=True)
    get.add_argument("--out", metavar="FILE", default="-", help="where to write it (default: stdout)")
    get.set_defaults(run=_unless_unknown(_get))

    put = _action(actions, "put", "Store a value, read from a file or stdin.", is_named=True)
    put.add_argument("--in", dest="source", metavar="FILE", default="-", help="the value (default: stdin)")
    put.add_argument(
        "--ttl", type=float, metavar="SECONDS", help="time to keep it (default: the longest, 30 days)"
    )
    put.add_argument(
        "--if-version", type=int, metavar="VERSION", help="only if it has this version; 0: there is none"
    )
    put.set_defaults(run=_unless_unknown(_put))

    drop = _action(actions, "drop", "Forget a record.", is_named=True)
    drop.set_defaults(run=_unless_unknown(_drop))


def _action(
    actions: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    description: str,
    *,
    is_named: bool = False,
) -> argparse.ArgumentParser:
    parser = actions.add_parser(
        name, help=description[0].lower() + description[1:-1], description=description
    )
    parser.add_argument("collection", metavar="COLLECTION", help="name of the collection")
    if is_named:
        parser.add_argument("name", metavar="NAME", help="name of the record")
    parser.add_argument("--salt-file", metavar="FILE", help="file that holds the tenant's salt")
    add_store_arguments(parser)
    return parser


def _unless_unknown(action: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Return the action, which ends with a status of its own where the store does not know the answer."""

    def run(args: argparse.Namespace) -> int:
        try:
            return action(args)
        except TierUnavailable as error:
            print(f"kvstore: {error}", file=sys.stderr)
            return _END_UNKNOWN

    return run


def _salt(args: argparse.Namespace) -> bytes:
    return b"" if args.salt_file is None else read_salt(args.salt_file)


def _list(args: argparse.Namespace) -> int:
    if args.limit is not None and args.limit < 1:
        raise InvalidRequest(f"--limit is {args.limit}, expected at least 1")
    with connected(args) as client:
        infos = _all(client, args)
        _say_what_is_kept(client)
    if args.json:
        print(json.dumps({"records": [info.as_dict() for info in infos]}))
        return 0
    for info in infos:
        print(
            f"{info.name}  {info.value_bytes} bytes, version {info.version}, {info.expires_in_s:.0f} s left"
        )
    return 0


def _say_what_is_kept(client: KVStore) -> None:
    """Say on stderr what a change of the configuration left behind, where the caller may see the stats."""
    try:
        stats = client.stats()["records"]
    except KVStoreError:
        return
    kept = stats.get("copies", stats)
    num_sealed, num_clear = kept["sealed_records"], kept["records"] - kept["sealed_records"]
    if kept["over_bytes"]:
        print(f"records count for {kept['over_bytes']} bytes more than records_bytes", file=sys.stderr)
    if num_sealed and not stats["is_encrypted"]:
        print(f"{num_sealed} records are encrypted: not readable without [encryption]", file=sys.stderr)
    if num_clear and stats["is_encrypted"]:
        print(f"{num_clear} records are not encrypted yet", file=sys.stderr)


def _all(client: KVStore, args: argparse.Namespace) -> list[RecordInfo]:
    """Return the records that are asked for, page by page."""
    salt, infos = _salt(args), list[RecordInfo]()
    while args.limit is None or len(infos) < args.limit:
        left = MAX_LISTED_RECORDS if args.limit is None else args.limit - len(infos)
        page = client.list_records(
            args.collection,
            prefix=args.prefix,
            after=infos[-1].name if infos else "",
            limit=min(MAX_LISTED_RECORDS, left),
            tenant_salt=salt,
        )
        infos += page
        if not page:
            break
    return infos


def _get(args: argparse.Namespace) -> int:
    if args.out == "-" and args.json:
        raise InvalidRequest("--out -: the value would mix with the JSON: name a file")
    with connected(args) as client:
        found = client.look_up_record(args.collection, args.name, tenant_salt=_salt(args))
    record = found.record
    if record is None:
        assert found.reason is not None, "a record that is absent has a reason"
        was_removed = args.out != "-" and remove_output(args.out)
        report: dict[str, object] = {"reason": found.reason.value}
        if was_removed:
            report["removed"] = args.out
        _say(args, report, f"there is none: {found.reason.value}", is_aside=args.out == "-")
        return 1
    if args.out == "-":
        sys.stdout.buffer.write(record.value)
        sys.stdout.buffer.flush()
    else:
        replace_output(args.out, memoryview(record.value))
    report = {
        "bytes": len(record.value),
        "version": record.version,
        "expires_in_s": round(record.expires_in_s, 3),
        "place": record.place.value,
        "is_current": record.is_current,
    }
    line = f"{len(record.value)} bytes, version {record.version}, from {record.place.value}"
    if not record.is_current:
        line += ", a copy: it may not be the latest"
    _say(args, report, line, is_aside=args.out == "-")
    return 0


def _put(args: argparse.Namespace) -> int:
    if args.source == "-":
        value = sys.stdin.buffer.read(MAX_RECORD_BYTES + 1)
    else:
        with Path(args.source).open("rb") as file:
            value = file.read(MAX_RECORD_BYTES + 1)
    with connected(args) as client:
        write = client.put_record(
            args.collection,
            args.name,
            value,
            ttl_s=args.ttl,
            if_version=args.if_version,
            tenant_salt=_salt(args),
        )
    report: dict[str, object] = {
        "outcome": write.outcome.value,
        "version": write.version,
        "is_doubtful": write.is_doubtful,
        "problem": write.problem,
    }
    _say(args, report, _line(write), is_aside=False)
    if write.outcome is RecordOutcome.UNAVAILABLE:
        return _END_UNKNOWN
    return 0 if write.is_stored else 1


def _line(write: RecordWrite) -> str:
    if write.is_stored:
        return f"stored, version {write.version}"
    line = f"not stored: {write.outcome.value}"
    if write.outcome is RecordOutcome.CONFLICT:
        line += f", it has version {write.version}" if write.version else ", there is none"
    line += f": {write.problem}" if write.problem else ""
    return line + ("; it may be stored all the same" if write.is_doubtful else "")


def _drop(args: argparse.Namespace) -> int:
    with connected(args) as client:
        was_there = client.drop_record(args.collection, args.name, tenant_salt=_salt(args))
    _say(args, {"dropped": was_there}, "forgotten" if was_there else "there was none", is_aside=False)
    return 0 if was_there else 1


def _say(args: argparse.Namespace, report: dict[str, object], line: str, *, is_aside: bool) -> None:
    """Print what happened; beside a value on stdout it goes to stderr."""
    if args.json:
        print(json.dumps(report))
    else:
        print(line, file=sys.stderr if is_aside else sys.stdout)
