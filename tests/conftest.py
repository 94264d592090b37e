"""Marks tests by their folder, and skips GPU tests with a reason where there is no GPU.

Fixtures here import what they need when they are asked for: some tests run without SGLang.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import networkx
import pytest
import torch
from hypothesis import HealthCheck, settings

from support.starts import ServerStart, read_starts, reasons, report
from support.warm import CHECKS, RUN_FOLDER, Nursery

# How long an example takes says nothing of the code: machines are busy.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
# Two threads that wait for each other are slower than one when a server runs beside them.
torch.set_num_threads(1)
ORDER = ("e2e", "gpu", "compat", "unit")
"""Folders, what takes longest first."""
SHARED_SERVERS = (
    *("overlap", "plain", "demo", "wordings", "demo_plain", "wordings_plain", "small_plain"),
    *("token", "semantic", "blocks", "equal", "two_ranks"),
)
"""Fixtures of tests/e2e/conftest.py. Those of the first ones run first: no process of tests works
alone at the end."""
LONGEST_FILES = ("test_families", "test_pools", "test_attention_backends", "test_wheel")
"""Of those without such servers: they would be alone at the end of the second tier."""
TIERS = ("fast", "nightly", "weekly")
LARGEST_GROUP = {"overlap", "blocks"}
"""Files that use these are a group apart: the random pair's would take half of a run in one
process. The other servers that both groups use start in both."""
MAX_EVICTED = 3
"""Servers that may start twice in a run: which files one process takes, and so how many servers it
keeps, is chance."""
GROUPS = "groups.json"
RUN = pytest.StashKey[tempfile.TemporaryDirectory]()


def pytest_configure(config: pytest.Config) -> None:
    """One folder for all processes of a run: its log of server starts, and its nursery's name."""
    if not hasattr(config, "workerinput"):
        config.stash[RUN] = tempfile.TemporaryDirectory(prefix="parse-tests-")
        os.environ[RUN_FOLDER] = config.stash[RUN].name


def pytest_sessionstart(session: pytest.Session) -> None:
    """Of a whole tier: the nursery of its servers imports SGLang while tests are collected."""
    config = session.config
    if config.args == config.getini("testpaths") and hasattr(config, "workerinput"):
        os.environ.update(CHECKS)
        Nursery()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, help="run only the tests of this tier")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Selected here, because what is not run must not group files.
    tier = config.getoption("--tier")
    others = [item for item in items if tier and tier_of(item) != tier]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if not tier or tier_of(item) == tier]
    shared = shared_servers(items)
    groups = groups_of_files(shared)
    places = {name: place for place, name in enumerate((*SHARED_SERVERS, *LONGEST_FILES, *ORDER))}

    def rank(item: pytest.Item) -> tuple[int, str, list[str]]:
        group, folder = groups[item.path], item.path.parent.name
        place = places.get(group, places.get(folder, len(places)))
        # What uses a server runs in turn, before others need its memory.
        return place, group, sorted(shared[item.path], reverse=True)

    items.sort(key=rank)
    if hasattr(config, "workerinput"):
        files = {item.nodeid.partition("::")[0]: groups[item.path] for item in items}
        (Path(os.environ[RUN_FOLDER]) / GROUPS).write_text(json.dumps(files))
    for item in items:
        folder = item.path.parent.name
        if folder in ORDER:
            item.add_marker(getattr(pytest.mark, folder))
        if folder == "gpu" and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; none is here"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """By groups of files. Only workers collect tests, so they write the groups down.

    pytest-xdist's own ``--dist loadgroup`` has no effect with pytest 9.2.
    """
    from xdist.scheduler import LoadFileScheduling

    class ByGroup(LoadFileScheduling):
        def schedule(self) -> None:
            self.groups = json.loads((Path(os.environ[RUN_FOLDER]) / GROUPS).read_text())
            super().schedule()

        def _split_scope(self, nodeid: str) -> str:
            return self.groups[super()._split_scope(nodeid)]

    return ByGroup(config, log)


def tier_of(item: pytest.Item) -> str:
    later = [tier for tier in TIERS[1:] if item.get_closest_marker(tier)]
    return later[-1] if later else TIERS[0]


def shared_servers(items: list[pytest.Item]) -> dict[Path, set[str]]:
    """Path -> the servers of ``SHARED_SERVERS`` that its tests use."""
    servers: dict[Path, set[str]] = {item.path: set() for item in items}
    for item in items:
        if item.path.parent.name == "e2e":
            named = {*item.fixturenames}
            if hasattr(item, "callspec"):  # a parameter for `request.getfixturevalue`
                named.add(item.callspec.params.get("server"))
            servers[item.path] |= named & {*SHARED_SERVERS}
    return servers


def groups_of_files(servers: dict[Path, set[str]]) -> dict[Path, str]:
    """Path -> its group, which one process runs: files that share a server, directly or by way of
    others, so that few servers are started in two processes."""
    graph = networkx.Graph()
    for path, named in servers.items():
        graph.add_node(path)
        is_apart = bool(named & LARGEST_GROUP)
        graph.add_edges_from((path, (one, is_apart)) for one in named)
    groups: dict[Path, str] = {}
    for component in networkx.connected_components(graph):
        paths = {node for node in component if isinstance(node, Path)}
        shared = {one for one, _ in component - paths}
        names = LARGEST_GROUP & shared or shared
        first = next((name for name in SHARED_SERVERS if name in names), None)
        for path in paths:
            groups[path] = first or path.stem
    return groups


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if RUN in session.config.stash and num_evicted(read_starts()) > MAX_EVICTED:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def num_evicted(starts: list[ServerStart]) -> int:
    return [*reasons(starts)].count("evicted")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    starts = read_starts()
    if not starts:
        return
    terminalreporter.section("servers started")
    for line in report(starts):
        terminalreporter.line(line)
    if (count := num_evicted(starts)) > MAX_EVICTED:
        terminalreporter.line(f"FAILED: {count} servers were started twice", red=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    if RUN in config.stash:
        config.stash[RUN].cleanup()


@pytest.fixture(autouse=True)
def restored_environment() -> Iterator[None]:
    """Restores variables that SGLang sets when it reads flags (the doctor's, in tests): servers of
    another environment than the nursery's start without it, and take 1.5 GB more each."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def nursery() -> Nursery:
    """Starts servers and programs by fork, without importing SGLang again."""
    return Nursery()


@pytest.fixture(scope="session")
def problems() -> list:
    """Held-out problems of the question pair, as prompts through its chat template."""
    from support.demo_pair import held_out

    return held_out(100)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The question pair's tokenizer."""
    from support.demo_pair import DEMO
    from support.models import load_tokenizer

    return load_tokenizer(DEMO / "target")
