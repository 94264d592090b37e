"""The ``sglang-parse`` command: what a person runs; no server imports it."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from types import FrameType


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; its exit code is the program's."""
    from sglang_parse.bench import kv, soak
    from sglang_parse.compare import settings as compare_settings
    from sglang_parse.demo import run, settings

    parser = argparse.ArgumentParser(prog="sglang-parse", description="PARSE for SGLang")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="measure PARSE, the plain target and the draft alone side by side",
        description="Starts three SGLang servers with the demo pair, sends them the same "
        "held-out problems and compares them. Exit code 1 when anything failed; a figure that "
        "misses its mark is reported and is no failure.",
    )
    settings.add_arguments(demo)
    demo.set_defaults(run=run.main)
    bench_kv = commands.add_parser(
        "bench-kv",
        help="KV slots held per request: PARSE against stock STANDALONE",
        description="Sends the same problems to PARSE and to SGLang's STANDALONE speculation, one "
        "server after the other, and compares the KV slots held beyond the committed tokens.",
    )
    kv.add_arguments(bench_kv)
    bench_kv.set_defaults(run=kv.main)
    soak_parser = commands.add_parser(
        "soak",
        help="thousands of mixed requests at once: errors, leaks and wrong bytes must be zero",
        description="Sends problems, chats and random text with stops, temperatures, fallbacks, "
        "aborts and disconnects to PARSE, and compares the exact half of them with a plain "
        "server's answers. Exit code 1 when anything failed, leaked or differed.",
    )
    soak.add_arguments(soak_parser)
    soak_parser.set_defaults(run=soak.main)
    compare = commands.add_parser(
        "compare",
        help="PARSE beside stock SGLang: speed, latency, accuracy, one page",
        description="Starts each server on this machine, or takes running ones; drives it with "
        "SGLang's bench_serving; grades its answers; writes results.json and report.html. Exit "
        "code 1 when anything failed; a figure that misses its mark is reported and is no failure.",
    )
    compare_settings.add_arguments(compare)
    compare.set_defaults(run=_compare)
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


def _compare(arguments: argparse.Namespace) -> int:
    try:
        from sglang_parse.compare import run
    except ModuleNotFoundError as error:
        fix = "pip install 'sglang-parse[compare]'"
        print(f"sglang-parse compare: {error.name} is not installed; fix: {fix}", file=sys.stderr)
        return 1
    return run.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
