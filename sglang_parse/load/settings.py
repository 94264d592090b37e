"""What the command line of ``sglang-parse load`` can ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sglang_parse.client.demo_pair import DEMO_PAIR, demo_models
from sglang_parse.client.flags import (
    Flags,
    at_least,
    numbers,
    option,
    share,
    split_names,
    split_words,
)
from sglang_parse.client.records import (
    EAGLE3,
    PARSE,
    PARSE_EAGLE3,
    PLAIN,
    STANDALONE,
    WITH_PARSE,
    BenchError,
)
from sglang_parse.client.servers import MODEL_NAME, Remote, ServerSpec
from sglang_parse.client.targets import Models, server_specs
from sglang_parse.load.names import environment_of, kind_of, names_at

SERVERS = (PLAIN, STANDALONE, EAGLE3, PARSE, PARSE_EAGLE3)
WAVES = 4
"""Requests at one place, one after another, at least."""


def _remotes(texts: Sequence[str]) -> dict[str, Remote]:
    remotes = {}
    for text in texts:
        name, _, url = text.partition("=")
        if not name or not url.startswith(("http://", "https://")):
            raise BenchError(f"--url is {text!r}; use NAME=http://host:port")
        remotes[name] = Remote(name, url.rstrip("/").removesuffix("/v1"))
    return remotes


@dataclass(frozen=True)
class LoadSettings(Flags):
    """What was asked for."""

    pair: Path = option(DEMO_PAIR, "folder with target/, draft/, eagle3/", type=Path)
    servers: tuple[str, ...] = option(
        "", f"default: {','.join(SERVERS)}, or those of --url", read=split_names
    )
    remotes: dict[str, Remote] = option(
        [],
        "a running server instead of one started here; repeatable",
        name="--url",
        action="append",
        metavar="NAME=URL",
        read=_remotes,
    )
    model_name: str = option(MODEL_NAME, "as it is served (default %(default)s)")
    parse_flags: tuple[str, ...] = option("", "more, for servers with PARSE", read=split_words)
    concurrencies: tuple[int, ...] = option(
        (1, 4, 16), "requests at a time", name="--concurrency", type=numbers(at_least(1))
    )
    off_shares: tuple[float, ...] = option(
        (0.0, 0.5, 1.0),
        "shares of the requests that switch PARSE off, where there is PARSE: those of a mixed load "
        "beside others that draft, and among their like",
        name="--off",
        type=numbers(share),
    )
    acceptances: tuple[float, ...] = option(
        (),
        "shares of every draft that are kept, simulated: servers with PARSE are started once for "
        "each, as NAME@SHARE; on all servers answers then end where right ones do",
        name="--acceptance",
        type=numbers(share),
    )
    runs: int = option(3, "of every server, in turns", type=at_least(1))
    fresh: bool = option(
        False,
        "start the servers anew for every run: the same forward may take some percent longer in "
        "one process than in the next",
        action="store_true",
    )
    least_requests: int = option(
        16,
        "of a loop at least; four times as many as at a time in any case",
        name="--requests",
        type=at_least(1),
    )
    max_tokens: int = option(256, "per answer", type=at_least(2))
    output: Path = option(Path("build/load"), "folder", type=Path)

    @property
    def names(self) -> tuple[str, ...]:
        """Servers, in their order."""
        named = self.servers or tuple(self.remotes) or SERVERS
        return tuple(
            name
            for kind in named
            for name in names_at(kind, () if kind in self.remotes else self.acceptances)
        )

    @property
    def specs(self) -> list[ServerSpec]:
        """The servers to start here. Raises: BenchError, when a model is not there."""
        names = [name for name in self.names if name not in self.remotes]
        if not names:
            return []
        kinds = {spec.name: spec for spec in server_specs(self.models, tuple(map(kind_of, names)))}
        return [replace(kinds[kind_of(n)], name=n, environment=environment_of(n)) for n in names]

    @property
    def models(self) -> Models:
        """What is served here. Raises: BenchError, when it is not there."""
        models = demo_models(self.pair)
        return replace(
            models,
            eagle3=str(self.pair / "eagle3"),
            parse_flags=(*models.parse_flags, *self.parse_flags),
            eagle3_steps=3,
            common=(*models.common, "--enable-metrics"),
        )

    def num_requests(self, concurrency: int) -> int:
        """Requests of one loop: enough that its beginning and end are the smaller part."""
        return max(self.least_requests, WAVES * concurrency)

    def shares(self, server: str) -> tuple[float, ...]:
        """The loads of a server, by their share of requests that switch PARSE off."""
        return self.off_shares if kind_of(server) in WITH_PARSE else (0.0,)

    def order(self, run: int) -> tuple[str, ...]:
        """Who plays when: there and back again, so that no server is always the first."""
        return self.names if run % 2 == 0 else self.names[::-1]


add_arguments = LoadSettings.add_arguments
