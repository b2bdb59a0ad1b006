"""``kvstore drop``, ``demote``, ``flush``, ``policy`` and ``epoch``: what moves blocks or forgets them."""

import argparse
import json
import sys

from kvstore.cli.block_naming import add_naming_arguments, opened, read_blocks, read_digest
from kvstore.cli.store_address import add_store_arguments, connected
from kvstore.cli.work_progress import Written, add_quiet_argument, progress_of_store
from kvstore.errors import ServerUnavailable, TierUnavailable
from kvstore.policy import POLICIES
from kvstore.policy_plan import NO_RULE, PolicyPlan, plan_text


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands to the command line's parser."""
    drop = subparsers.add_parser(
        "drop",
        help="forget blocks in every tier",
        description="Forget every copy of a prompt's blocks that is not leased. Exit status: 0 dropped,"
        " 1 none was stored, 2 bad input, 3 no server.",
    )
    demote = subparsers.add_parser(
        "demote",
        help="move blocks from memory to a tier below",
        description="Write a prompt's blocks to a tier below and take them out of memory; leased ones stay."
        " Exit status: 0 demoted, 1 none was in memory, 2 bad input, 3 no server.",
    )
    for parser, run in ((drop, run_drop), (demote, run_demote)):
        add_naming_arguments(parser)
        add_store_arguments(parser)
        parser.set_defaults(run=run)

    flush = subparsers.add_parser(
        "flush",
        help="wait until what was put is written to the tiers below",
        description="Wait until the blocks put so far are written to the tiers below memory, as before a"
        " restart; under write_mode back too. The store goes on serving, and takes more blocks. What a tier"
        " that is down does not take is dropped and counted,"
        " not waited for. Exit status: 0 done, 1 not in time, 2 usage, 3 no server.",
    )
    add_quiet_argument(flush)
    add_store_arguments(flush)
    flush.set_defaults(run=run_flush)

    epoch = subparsers.add_parser(
        "epoch",
        help="end a model's epoch: nothing stored for it so far is served again",
        description="End a model's epoch, on every node that shares the remote tier: for weights that change"
        " in place. Prints the new epoch. Exit status: 0 done, 1 done here but not told to other nodes yet,"
        " 2 usage, 3 no server.",
    )
    epoch.add_argument("--model", required=True, help="the model's name")
    epoch.add_argument("--advance", action="store_true", required=True, help="say that this is meant")
    add_store_arguments(epoch)
    epoch.set_defaults(run=run_epoch)

    policy = subparsers.add_parser(
        "policy",
        help="change the policy of a running store; no block is lost",
        description="Give a running store another policy, until it ends: everywhere, or in one tier, or for"
        " one namespace, or both; default takes the policy of a tier or namespace away. No block is lost,"
        " and leases stay. Exit status: 0 done, 2 usage, 3 no server.",
    )
    policy.add_argument(
        "name",
        metavar="NAME",
        choices=(*POLICIES, NO_RULE),
        help=f"{', '.join(POLICIES)}; or {NO_RULE}: none of its own, with --tier or --namespace",
    )
    policy.add_argument("--tier", metavar="NAME", help="in this tier only: dram or ssd")
    policy.add_argument(
        "--namespace", metavar="DIGEST", help="for the blocks of this namespace only: its digest in hex"
    )
    add_store_arguments(policy)
    policy.set_defaults(run=run_policy)


def run_policy(args: argparse.Namespace) -> int:
    """Change the policy and print what holds now and what held before."""
    namespace = None if args.namespace is None else read_digest(args.namespace)
    text = plan_text(args.name, tier=args.tier, namespace=namespace)
    PolicyPlan().amended(text)
    with connected(args) as client:
        before = client.change_policy(text)
        now = str(client.stats()["policy"])
    print(json.dumps({"policy": now, "before": before}) if args.json else f"{now}; {before} before")
    return 0


def run_drop(args: argparse.Namespace) -> int:
    """Drop blocks; 0 if there were any."""
    namespace, _ = read_blocks(args)
    with connected(args) as client:
        _, chain = opened(client, namespace, args)
        num_dropped = client.drop(chain)
    print(json.dumps({"dropped": num_dropped}) if args.json else f"{num_dropped} dropped")
    return 0 if num_dropped else 1


def run_demote(args: argparse.Namespace) -> int:
    """Demote blocks; 0 if there were any."""
    namespace, _ = read_blocks(args)
    with connected(args) as client:
        _, chain = opened(client, namespace, args)
        num_demoted = client.demote(chain)
    print(json.dumps({"demoted": num_demoted}) if args.json else f"{num_demoted} demoted")
    return 0 if num_demoted else 1


def run_flush(args: argparse.Namespace) -> int:
    """Wait for the writes; 0 if all were done in the command's time."""
    with connected(args) as client:
        try:
            with progress_of_store(args, "writing", Written()):
                is_flushed = client.flush(args.timeout)
        except ServerUnavailable:
            client.ping()  # raises if the server is gone; else its answer came a moment too late
            is_flushed = False
    print(json.dumps({"flushed": is_flushed}) if args.json else "flushed" if is_flushed else "not in time")
    return 0 if is_flushed else 1


def run_epoch(args: argparse.Namespace) -> int:
    """End the present epoch and print the new one."""
    with connected(args) as client:
        try:
            epoch = client.advance_epoch(args.model)
        except TierUnavailable as error:
            print(f"kvstore: {error}", file=sys.stderr)
            if args.json:
                print(json.dumps({"model": args.model, "epoch": None, "error": str(error)}))
            return 1
    print(json.dumps({"model": args.model, "epoch": epoch}) if args.json else f"epoch {epoch}")
    return 0
