"""A port that is in use is found before models are loaded (ledger: port)."""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.overrides import resolving_view

from sglang_parse.algorithm import names_parse
from sglang_parse.patches.base import Patch, before
from sglang_parse.startup.checks import check_port


def _check_port(server_args: Any, *_: Any, **__: Any) -> None:
    settings = resolving_view(server_args)
    if names_parse(settings):
        check_port(settings)


PATCH = Patch(
    "port",
    {"sglang.srt.entrypoints.http_server.launch_server": before(_check_port)},
    why="SGLang binds the server's port after it has loaded the models, minutes later for large "
    "ones.",
    how="binds and releases the port first, for PARSE only. Offline engines, which use no port, do "
    "not call the function.",
    removed_when="SGLang checks the port before it loads models.",
    launcher_only=True,
)
