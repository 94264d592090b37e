"""Checks of this Python: SGLang finds PARSE, is the version that PARSE supports, and is patched."""

from __future__ import annotations

import os
import sys
from importlib import metadata

from sglang.srt.plugins import GENERAL_PLUGINS_GROUP, load_plugins
from sglang.srt.speculative.spec_registry import get_spec

from sglang_parse import patches
from sglang_parse.algorithm import NAME
from sglang_parse.client import conditions
from sglang_parse.doctor.finding import Check, Problem
from sglang_parse.startup import compat

ALLOWED, PLUGIN, VALUE = "SGLANG_PLUGINS", "parse", "sglang_parse.plugin:register"


def checks() -> list[Check]:
    return [("versions", versions), ("plugin", plugin), ("patches", patches_applied)]


def versions() -> str:
    compat.check_version()
    return ", ".join(f"{name} {version}" for name, version in conditions.versions().items())


def plugin() -> str:
    entries = metadata.entry_points(group=GENERAL_PLUGINS_GROUP, name=PLUGIN)
    if VALUE not in [entry.value for entry in entries]:
        raise Problem(
            f"no package in {sys.prefix} has the entry point {PLUGIN} = {VALUE}",
            "pip install sglang-parse with this Python, or run the server's Python",
        )
    # SGLang treats an empty value as unset.
    allowed = os.environ.get(ALLOWED, "")
    if allowed and PLUGIN not in [name.strip() for name in allowed.split(",")]:
        raise Problem(
            f"{ALLOWED} is {allowed!r}, which hides the plugin {PLUGIN!r} from SGLang",
            f"add {PLUGIN} to it, or unset it",
        )
    load_plugins()
    if get_spec(NAME) is None:
        raise Problem(
            f"SGLang found the plugin {PLUGIN!r} and could not load it",
            "see the reason above, after 'Failed to load plugin'",
        )
    return f"SGLang finds and loads {PLUGIN!r}; {ALLOWED} is {allowed or 'not set'}"


def patches_applied() -> str:
    compat.check_symbols(patches.symbols())
    patches.assert_applied()
    return f"{len(patches.needed())} applied"
