"""The ``sglang-parse`` command: what a person runs; no server imports it."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: ``add_arguments`` gives its parser flags, ``run`` returns the exit code."""

    name: str
    help: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _commands() -> tuple[Command, ...]:
    # Here, so that importing this module costs nothing.
    from sglang_parse.bench import kv
    from sglang_parse.bench.compare import settings as compare_settings
    from sglang_parse.bench.demo import run as demo
    from sglang_parse.bench.demo import settings as demo_settings
    from sglang_parse.bench.limit import speed_settings
    from sglang_parse.bench.soak import run as soak

    return (
        Command(
            "demo",
            "measure PARSE, the plain target and the draft alone side by side",
            "Starts three SGLang servers with the demo pair, sends them the same held-out problems "
            "and compares them. Exit code 1 when anything failed; a figure that misses its mark is "
            "reported and is no failure.",
            demo_settings.add_arguments,
            demo.main,
        ),
        Command(
            "bench",
            "real shapes without weights, simulated acceptance: speed against the limit",
            "Starts the plain target, the draft alone and PARSE at several accepted fractions, one "
            "server after the other, and measures them: results.json, bench.html. Exit code 1 when "
            "anything failed; a figure that misses its mark is reported and is no failure.",
            speed_settings.add_arguments,
            partial(_with_extra, "sglang_parse.bench.limit.speed"),
        ),
        Command(
            "bench-kv",
            "KV slots held per request: PARSE against stock STANDALONE",
            "Sends the same problems to PARSE and to SGLang's STANDALONE speculation, one server "
            "after the other, and compares the KV slots held beyond the committed tokens.",
            kv.add_arguments,
            kv.main,
        ),
        Command(
            "soak",
            "thousands of mixed requests at once: errors, leaks and wrong bytes must be zero",
            "Sends problems, chats and random text with stops, temperatures, fallbacks, aborts and "
            "disconnects to PARSE, and compares the exact half of them with a plain server's "
            "answers. Exit code 1 when anything failed, leaked or differed.",
            soak.add_arguments,
            soak.main,
        ),
        Command(
            "compare",
            "PARSE beside stock SGLang: speed, latency, accuracy, one page",
            "Starts each server on this machine, or takes running ones; drives it with SGLang's "
            "bench_serving; grades its answers; writes results.json and report.html. Exit code 1 "
            "when anything failed; a figure that misses its mark is reported and is no failure.",
            compare_settings.add_arguments,
            partial(_with_extra, "sglang_parse.bench.compare.run"),
        ),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; its exit code is the program's."""
    parser = argparse.ArgumentParser(prog="sglang-parse", description="PARSE for SGLang")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for command in _commands():
        subparser = subparsers.add_parser(
            command.name, help=command.help, description=command.description
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    arguments = parser.parse_args(argv)
    end_on_sigterm()
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        text = f"sglang-parse {arguments.command}: interrupted; all servers were ended"
        print(text, file=sys.stderr)
        return 130


def end_on_sigterm() -> None:
    """A plain `kill` leaves through every `finally`, so that the servers are ended too."""

    def leave(number: int, frame: FrameType | None) -> None:
        del frame
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def _with_extra(module: str, arguments: argparse.Namespace) -> int:
    """Run a module's ``main``; it may need packages that are an extra of ours."""
    try:
        main_of = importlib.import_module(module).main
    except ModuleNotFoundError as error:
        fix = "pip install 'sglang-parse[compare]'"
        what = f"sglang-parse {arguments.command}: {error.name} is not installed"
        print(f"{what}; fix: {fix}", file=sys.stderr)
        return 1
    return main_of(arguments)


if __name__ == "__main__":
    sys.exit(main())
