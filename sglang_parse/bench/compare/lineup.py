"""Which servers are compared, and how each is started.

The stock ones get the settings a user would choose for them: chains (topk 1), no thresholds, the
number of steps from the command line.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sglang_parse.bench.compare.records import CompareError, Way
from sglang_parse.bench.demo.records import DRAFT, PARSE, PLAIN
from sglang_parse.bench.demo.records import TITLES as DEMO_TITLES
from sglang_parse.bench.demo.servers import ServerSpec

STANDALONE, EAGLE3, PARSE_EAGLE3 = "standalone", "eagle3", "parse-eagle3"
TITLES = {
    **DEMO_TITLES,
    STANDALONE: "STANDALONE",
    EAGLE3: "EAGLE3",
    PARSE_EAGLE3: "PARSE+EAGLE3",
}
WITH_PARSE = (PARSE, PARSE_EAGLE3)
NOTES = {
    STANDALONE: "SGLang's STANDALONE shifts the prompt by one token, as EAGLE needs it: its draft "
    "model never sees the first token and accepts less than it could. PARSE's sees all of it.",
    PARSE: "On a CPU SGLang schedules the plain target and the draft alone with overlap, PARSE "
    "without, because a CPU that works through an iteration has nothing else to do.",
}
"""What a fair reader must know about a server that takes part."""


def label(way: Way) -> str:
    """A way's name on the page."""
    title = TITLES.get(way.server, way.server)
    return title if way.threshold is None else f"{title} at {way.threshold:g}"


@dataclass(frozen=True, slots=True)
class Models:
    """What is served, and the flags that all servers share.

    Attributes:
        eagle3: folder with an EAGLE-3 head for the target; None leaves out the servers with it.
        question: PARSE's question file; None asks the built-in one.
        common: SGLang's flags for every server.
        parse_flags: more flags for the servers with PARSE.
        standalone_steps, eagle3_steps: draft tokens per verification of the stock servers, and of
            PARSE's EAGLE-3 continuation.
    """

    target: str
    draft: str
    eagle3: str | None
    question: str | None
    common: tuple[str, ...]
    parse_flags: tuple[str, ...] = ()
    standalone_steps: int = 4
    eagle3_steps: int = 4

    def check_local(self) -> None:
        """A folder that is not there is no hub name: Raises: CompareError."""
        for flag, path in (
            ("--target", self.target),
            ("--draft", self.draft),
            ("--eagle3", self.eagle3),
        ):
            looks_local = path is not None and (path.startswith(("/", ".")) or Path(path).exists())
            if looks_local and not (Path(path or "") / "config.json").is_file():
                raise CompareError(f"{flag} is {path!r}, which holds no model (no config.json)")


def _plain(models: Models) -> tuple[str, ...]:
    return ("--model-path", models.target)


def _draft(models: Models) -> tuple[str, ...]:
    return ("--model-path", models.draft)


def chain(algorithm: str, draft: str, num_steps: int) -> tuple[str, ...]:
    """Stock speculation with chains of ``num_steps`` draft tokens."""
    named = ("--speculative-algorithm", algorithm, "--speculative-draft-model-path", draft)
    return (*named, *_steps(num_steps))


def _steps(num_steps: int) -> tuple[str, ...]:
    return (
        *("--speculative-num-steps", str(num_steps), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(num_steps + 1)),
    )


def _standalone(models: Models) -> tuple[str, ...]:
    return (*_plain(models), *chain("STANDALONE", models.draft, models.standalone_steps))


def _eagle3(models: Models) -> tuple[str, ...]:
    return (*_plain(models), *chain("EAGLE3", _head(models), models.eagle3_steps))


def _parse(models: Models) -> tuple[str, ...]:
    question = ("--parse-question", models.question) if models.question else ()
    return (
        *_plain(models),
        *("--speculative-algorithm", "PARSE", "--speculative-draft-model-path", models.draft),
        *question,
        *models.parse_flags,
    )


def _parse_eagle3(models: Models) -> tuple[str, ...]:
    return (
        *_parse(models),
        *("--parse-continuation", "eagle3", "--parse-eagle3-path", _head(models)),
        *_steps(models.eagle3_steps),
    )


def _head(models: Models) -> str:
    if models.eagle3 is None:
        raise CompareError(
            "servers with EAGLE-3 need a head for the target; fix: give --eagle3 its folder, or "
            "leave them out with --servers"
        )
    return models.eagle3


_FLAGS: dict[str, Callable[[Models], tuple[str, ...]]] = {
    PLAIN: _plain,
    STANDALONE: _standalone,
    EAGLE3: _eagle3,
    PARSE: _parse,
    PARSE_EAGLE3: _parse_eagle3,
    DRAFT: _draft,
}


def lineup(models: Models, names: tuple[str, ...]) -> list[ServerSpec]:
    """How to start the named servers, in that order.

    Raises:
        CompareError: a name is unknown, or its model was not given.
    """
    for name in names:
        if name not in _FLAGS:
            raise CompareError(f"--servers names {name!r}; known: {', '.join(_FLAGS)}")
    return [ServerSpec(name, _FLAGS[name](models), common=models.common) for name in names]


def command_of(spec: ServerSpec) -> str:
    """The command line of a server, without its port."""
    return shlex.join(["python", *spec.launcher, *spec.common, *spec.flags])
