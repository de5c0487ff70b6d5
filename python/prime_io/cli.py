"""The `prime-io` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import msgspec

from . import __version__
from .plan import plan, table
from .segment import FieldSpec
from .steps import COMPONENTS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 if it went well, 1 with a sentence on stderr if not."""
    parser = argparse.ArgumentParser(prog="prime-io", description="Payload I/O for asynchronous RL.")
    parser.add_argument("--version", action="version", version=f"prime-io {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_plan(commands)
    args = parser.parse_args(argv)
    try:
        print(args.command(args))
    except (OSError, ValueError) as error:
        print(f"prime-io: {_sentence(error)}", file=sys.stderr)
        return 1
    return 0


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "say what a resume would keep, drop and ask for again; reads only, takes no lock"
    parser = commands.add_parser("plan", help=about, description=about)
    parser.add_argument("run", help="the run directory")
    parser.add_argument("--step", type=int, help="the complete step to resume from (default: the newest)")
    parser.add_argument(
        "--max-off-policy-steps", type=int, help="as the run will have it; without it nothing is judged stale"
    )
    parser.add_argument(
        "--optional",
        action="append",
        default=[],
        metavar="FIELD",
        help="a payload field that is not required",
    )
    parser.add_argument("--store", help="the payload directory (default: RUN/payloads)")
    parser.add_argument(
        "--components",
        default=",".join(COMPONENTS),
        help="what makes a step complete: names of committed components (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="everything, with ids and files, as JSON")
    parser.set_defaults(command=_plan)


def _plan(args: argparse.Namespace) -> str:
    made = plan(
        args.run,
        args.step,
        max_off_policy_steps=args.max_off_policy_steps,
        fields={name: FieldSpec(required=False) for name in args.optional},
        store=args.store,
        components=args.components.split(","),
    )
    return msgspec.json.format(msgspec.json.encode(made)).decode() if args.json else table(made)


def _sentence(error: OSError | ValueError) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error)


if __name__ == "__main__":
    sys.exit(main())
