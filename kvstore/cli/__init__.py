"""The command ``kvstore``: one module per group of commands, loaded only when its command is chosen."""

import argparse
import importlib
import io
import sys
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.errors import CorruptBlock, KVStoreError, ProtocolMismatch, ServerUnavailable

EXIT_OK = 0
EXIT_PROBLEM = 1
EXIT_USAGE = 2
EXIT_NO_SERVER = 3


class Command(NamedTuple):
    """One command: its name, the module whose ``register`` adds it, and its line in the help."""

    name: str
    module: str
    help: str


COMMANDS = (
    Command("serve", "kvstore.cli.serve_command", "run a store until it is told to stop"),
    Command("put", "kvstore.cli.block_commands", "store blocks"),
    Command("get", "kvstore.cli.block_commands", "fetch the longest stored prefix"),
    Command("match", "kvstore.cli.block_commands", "count the leading blocks that are stored"),
    Command("stats", "kvstore.cli.state_commands", "show a store's counters and occupancy"),
    Command(
        "size",
        "kvstore.cli.size_command",
        "estimate the hit rate that a store would have with more or less room",
    ),
    Command(
        "top", "kvstore.cli.top_command", "watch a store: hit rates, occupancy, transfers, misses, faults"
    ),
    Command("check", "kvstore.cli.state_commands", "verify a store's invariants and a sample of checksums"),
    Command(
        "why", "kvstore.cli.why_command", "explain block by block what is stored, and why the rest is not"
    ),
    Command("drop", "kvstore.cli.move_commands", "forget blocks in every tier"),
    Command("demote", "kvstore.cli.move_commands", "move blocks from memory to a tier below"),
    Command("flush", "kvstore.cli.move_commands", "wait until what was put is written to the tiers below"),
    Command("policy", "kvstore.cli.move_commands", "change the policy of a running store; no block is lost"),
    Command(
        "epoch", "kvstore.cli.move_commands", "end a model's epoch: nothing stored for it is served again"
    ),
    Command(
        "erase",
        "kvstore.cli.erase_command",
        "destroy a tenant's key, so that nothing stored for it can be read again",
    ),
    Command("records", "kvstore.cli.records_command", "list, read, store and forget records"),
    Command("config", "kvstore.cli.config_command", "check a configuration file and show what is in force"),
    Command("keys", "kvstore.cli.keys_command", "make and change the file of API keys"),
    Command("engine", "kvstore.cli.engine", "run an inference replica over a store"),
    Command("demo", "kvstore.cli.demo", "run two nodes with a real model and check every tier"),
    Command("drill", "kvstore.cli.drill_command", "inject faults into real parts and check every promise"),
    Command(
        "replay",
        "kvstore.cli.replay_command",
        "replay recorded traffic through eviction policies, beside the best possible",
    ),
    Command("version", "kvstore.cli.version_command", "show the version"),
)

_EPILOG = "Exit status: 0 done, 1 found a problem, 2 usage or bad input, 3 no server."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Errors are one line on stderr, never a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the name of a file need not be text
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    try:
        args = _parser(chosen).parse_args(arguments)
        status: int = args.run(args)
    except SystemExit as end:  # argparse ends so, after help or a usage error
        return end.code if isinstance(end.code, int) else EXIT_USAGE
    except KVStoreError as error:
        _complain(str(error))
        return _status(error)
    except BrokenPipeError:
        return _end_quietly()
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _complain(f"{where}{error.strerror or error}")
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 130
    return status


def command_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of one command, for the reference of all commands."""
    subparsers = argparse.ArgumentParser(prog="kvstore").add_subparsers()
    _register(next(command.module for command in COMMANDS if command.name == name), subparsers)
    return subparsers.choices[name]


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """Return the parser with the chosen command's own arguments; the others are only listed."""
    parser = argparse.ArgumentParser(
        prog="kvstore", description="A tiered KV-cache storage service for LLM inference.", epilog=_EPILOG
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    chosen_module = next((command.module for command in COMMANDS if command.name == chosen), None)
    is_registered = chosen_module is not None and _register(chosen_module, subparsers)
    for command in COMMANDS:
        if not (is_registered and command.module == chosen_module):
            listed = subparsers.add_parser(command.name, help=command.help, add_help=False)
            listed.set_defaults(run=_report_absent, command=command.name)
    return parser


def _register(module: str, subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> bool:
    """Load a command's module and let it add its commands; False if there is no such module."""
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise KVStoreError(
                f"the command needs {error.name}: pip install 'tiered-kvstore[server,engine]'"
            ) from error
        return False
    loaded.register(subparsers)
    return True


def _report_absent(args: argparse.Namespace) -> int:
    _complain(f"{args.command}: this installation does not have the command")
    return EXIT_USAGE


def _status(error: KVStoreError) -> int:
    if isinstance(error, ServerUnavailable | ProtocolMismatch):
        return EXIT_NO_SERVER
    return EXIT_PROBLEM if isinstance(error, CorruptBlock) else EXIT_USAGE


def _complain(text: str) -> None:
    print(f"kvstore: {' '.join(text.split())}", file=sys.stderr)


def _end_quietly() -> int:
    # Whoever read our output is gone; the interpreter would complain when it flushes the rest.
    sys.stdout = open("/dev/null", "w")  # noqa: PTH123, SIM115
    return EXIT_PROBLEM
