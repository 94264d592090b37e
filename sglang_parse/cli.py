"""The ``sglang-parse`` command; no server imports it."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand.

    Attributes:
        package: its module ``settings`` has ``add_arguments`` for the flags; its module ``run`` has
            ``run(arguments, console)``, which returns the exit code, and is imported when it runs,
            because it may need the packages of ``extra``.
        takes_server_flags: whether other flags are passed on as ``arguments.server_flags``.
    """

    name: str
    help: str
    description: str
    package: str
    takes_server_flags: bool = False
    extra: str = "compare"


COMMANDS = (
    Command(
        "demo",
        "PARSE, the plain target, stock STANDALONE and EAGLE3 side by side, on the demo pair",
        "A preset of compare: six servers, the same problems; prints speeds, exact answers and "
        "one answer segment by segment.",
        "compare",
    ),
    Command(
        "bench",
        "real shapes without weights: PARSE versus stock SGLang at simulated acceptance",
        "Starts the plain target, stock EAGLE3 and STANDALONE at an accept length, and PARSE at "
        "several simulated acceptances, and measures them: results.json after each.",
        "bench",
    ),
    Command(
        "roofline",
        "what a target and a draft model can gain on a GPU, from their shapes; needs no GPU",
        "Computes bytes, operations and kernels of forwards, and the speedup by acceptance of one "
        "token per forward, blocks and text drafts, beside EAGLE-3 at accept lengths.",
        "roofline",
    ),
    Command(
        "load",
        "latencies under load, also of requests that switch PARSE off while others draft",
        "A preset of compare: throughput, time to first token, inter-token latency and stages of "
        "each server at several concurrencies.",
        "compare",
    ),
    Command(
        "compare",
        "PARSE versus stock SGLang on one page: speed, latency, accuracy",
        "Starts each server on this machine, or takes running ones; drives it with SGLang's "
        "bench_serving; grades its answers; writes results.json and report.html.",
        "compare",
    ),
    Command(
        "try",
        "what PARSE gains for your target and draft model, why not more, and the flags to set",
        "Checks the pair, starts PARSE and the plain target in turn, or takes running ones, and "
        "asks them prompts; predicts token mode and the likelihood at several draft lengths from "
        "what the target reads in drafts: results.json and report.html, in a quarter of an hour.",
        "trial",
    ),
    Command(
        "doctor",
        "check a server before it starts, or one that runs: a line and a fix per problem",
        "Checks this machine and, given the flags of python -m sglang.launch_server, the server "
        "they would start; with --url a running server, to which it sends a few prompts.",
        "doctor",
        takes_server_flags=True,
    ),
    Command(
        "models",
        "which models PARSE serves, what drafts for them, and how each was seen to run",
        "Prints the families of models; given one model, whether it is served, by its config.json, "
        "and if not, why. Exit code 1 when it is refused as target.",
        "models",
    ),
    Command(
        "explain",
        "an answer's drafts and verdicts on one page: what was accepted or rejected, and why",
        "Sends prompts to a running PARSE server, or reads answers saved with their traces; prints "
        "each answer segment by segment and writes explain.html with a movable threshold.",
        "explain",
    ),
    Command(
        "calibrate",
        "certify a threshold, and measure the cost of every other one",
        "Verifies first drafts of graded problems, tests thresholds on them (Learn-then-Test) and "
        "answers other problems at the certified one; writes report.html and calibration.json "
        "for --parse-threshold. Exit code 3: right and wrong drafts get the same verdicts; that no "
        "threshold qualifies is a result.",
        "calibrate",
        extra="calibrate",
    ),
    Command(
        "train-judge",
        "train a verdict head: verdicts without a question, from the target's hidden states",
        "Verifies first drafts of graded problems, or given ones, with the target's hidden states; "
        "trains a head that tells right from wrong prefixes, beside the question and the "
        "likelihood; writes a folder for --parse-judge and report.html. That there is nothing to "
        "learn is a result.",
        "train_judge",
        extra="train-judge",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sglang-parse", description="PARSE for SGLang")
    subparsers = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS:
        description = f"{command.description} Exit code 1: something failed."
        subparser = subparsers.add_parser(command.name, help=command.help, description=description)
        flags = _module(f"{command.package}.settings")
        flags.add_arguments(subparser, **getattr(flags, "PRESETS", {}).get(command.name, {}))
        subparser.set_defaults(chosen=command)
    arguments, others = parser.parse_known_args(argv)
    if others and not arguments.chosen.takes_server_flags:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    arguments.server_flags = others
    end_on_sigterm()
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        text = f"sglang-parse {arguments.command}: interrupted; all servers were ended"
        print(text, file=sys.stderr)
        return 130


def end_on_sigterm() -> None:
    """Makes SIGTERM raise SystemExit, so that every `finally` runs and the servers end."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"sglang_parse.{name}")


def _run(arguments: argparse.Namespace) -> int:
    try:
        run = _module(f"{arguments.chosen.package}.run").run
    except ModuleNotFoundError as error:
        fix = f"pip install 'sglang-parse[{arguments.chosen.extra}]'"
        what = f"sglang-parse {arguments.command}: {error.name} is not installed"
        print(f"{what}; fix: {fix}", file=sys.stderr)
        return 1
    return _module("client.program").run_program(arguments.command, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
