"""Prometheus metrics and the decode log line equal the sums of the responses."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sglang_parse.client.servers import Remote, awake
from sglang_parse.compare.serving import PASSES, ROWS, STAGE_SECONDS, server_totals
from sglang_parse.telemetry.drift import WINDOW
from sglang_parse.telemetry.metrics import METRICS, PREFIX
from support import calibration
from support.client import DRAFTS, HTTP, Client, parse_info, random_prompts, recorded_iterations
from support.dashboard import selectors
from support.servers import (
    EVERY_LINE,
    QUESTION,
    SEED,
    SMALL_CHUNKS,
    Start,
    parse_flags,
)

PROMPTS = random_prompts(10, 121)
LONG_PROMPT = random_prompts(1, 122, longest=6)[0] * 120  # prefilled in several chunks
LENGTH = {"max_new_tokens": 48, "ignore_eos": True}
ACCEPT_SOME = {"trace": True, "threshold": 0.45, **DRAFTS}
FALLBACKS = {
    "switched off": {"parse": {"enabled": False}},
    "sampling mask": {"top": {"return_sampling_mask": True}},
}
LINE = re.compile(
    r"Decode batch, #running-req: (?P<running>\d+), .*"
    r"rounds: (?P<rounds>\d+), drafted: (?P<drafted>\d+), verified: (?P<verified>\d+), "
    r"accepted: (?P<accepted>\d+) \((?P<accept_ratio>[\d.]+)\), target tokens: (?P<target>\d+), "
    r"#drafting: (?P<drafting>\d+), #verifying: (?P<verifying>\d+), "
    r"#decoding: (?P<decoding>\d+), #plain: (?P<plain>\d+), .*gen throughput"
)
SEMANTIC = (*QUESTION, "--parse-segment", "tokens:3", "--parse-draft-tokens", "20")
CHUNKS = ("--parse-draft-chunk", "6", *SMALL_CHUNKS, *SEED, *EVERY_LINE)


@dataclass(frozen=True)
class Watched:
    """A server, its log, and the changes between two scrapes."""

    client: Client
    log: Path

    def lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()


@pytest.fixture(scope="module")
def watched(
    start_server: Start, pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    """Serves with a certificate of another server."""
    path = tmp_path_factory.mktemp("certificate") / "calibration.json"
    path.write_text(calibration.calibration()[1].model_dump_json())
    flags = ("--parse-threshold", str(path), "--enable-metrics")
    server = start_server("metrics", *parse_flags(pair, *SEMANTIC), *CHUNKS, *flags)
    with awake(server):
        yield Watched(Client.of(server), server.log)


@pytest.fixture
def unwatched(token: Client) -> Watched:
    return Watched(token, token.probe.folder.with_suffix(".log"))


# -- reading --------------------------------------------------------------------


def samples(client: Client) -> Counter[tuple[str, str]]:
    """Returns PARSE's metrics: (sample, label value) -> value; ``le`` is a label, too."""
    found: Counter[tuple[str, str]] = Counter()
    own_labels = {"le"} | {metric.label for metric in METRICS if metric.label}
    for family in text_string_to_metric_families(page(client)):
        for sample in family.samples:
            if sample.name.startswith(PREFIX) and not sample.name.endswith("_created"):
                own = [value for name, value in sample.labels.items() if name in own_labels]
                found[sample.name.removeprefix(PREFIX), "".join(own)] += sample.value
    return found


def page(client: Client) -> str:
    response = HTTP.get(f"{client.url}/metrics", timeout=60)
    response.raise_for_status()
    return response.text


def growth(after: Counter, before: Counter) -> dict[tuple[str, str], float]:
    return {key: after[key] - before[key] for key in {*after, *before}}


def settle(client: Client) -> None:
    """Waits until every earlier request is finished, counted and logged."""
    client.generate(PROMPTS[0], max_new_tokens=2, ignore_eos=True)
    client.wait_idle()


# -- sending --------------------------------------------------------------------


def stream(client: Client, prompt: list[int]) -> dict[str, Any]:
    """Returns the last chunk of a streamed response."""
    params = {"temperature": 0, "custom_params": {"parse": ACCEPT_SOME}, **LENGTH}
    body = {"input_ids": prompt, "stream": True, "sampling_params": params}
    with HTTP.stream("POST", f"{client.url}/generate", json=body, timeout=120) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    assert len(lines) > 2
    return json.loads(lines[-1])


def aborted(client: Client, prompt: list[int]) -> dict[str, Any]:
    """Returns the response of a request that is aborted while it drafts."""
    with (
        client.probe.fault("draft-chunk", "slow", seconds=0.2, skip=8) as fault,
        ThreadPoolExecutor(1) as pool,
    ):
        options = {"parse": ACCEPT_SOME, "max_new_tokens": 400, "ignore_eos": True}
        job = pool.submit(client.generate, prompt, top={"rid": "to-abort"}, **options)
        fault.wait_fired()
        client.abort("to-abort")
        answer = job.result()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    return answer


def mixed_requests(client: Client) -> list[dict[str, Any]]:
    """Returns responses to concurrent requests of every kind."""
    plain = client.generate(PROMPTS[7], parse={"enabled": False}, **LENGTH)
    stop_inside_a_run = {"stop_token_ids": plain["output_ids"][20:22]}
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(client.generate, p, parse=ACCEPT_SOME, **LENGTH) for p in PROMPTS]
        jobs += [
            pool.submit(client.generate, PROMPTS[1], **LENGTH, **kind)
            for kind in FALLBACKS.values()
        ]
        jobs += [pool.submit(stream, client, prompt) for prompt in PROMPTS[2:4]]
        for prompt, options in (
            (LONG_PROMPT, {}),
            (PROMPTS[4], {"max_new_tokens": 1}),  # finishes in prefill
            (PROMPTS[5], {"temperature": 0.8}),
            (PROMPTS[6], {"ignore_eos": False}),
            (PROMPTS[7], stop_inside_a_run),
            (PROMPTS[7], stop_inside_a_run | {"threshold": 0.0}),
        ):
            parse = ACCEPT_SOME | {"threshold": options.pop("threshold", 0.45)}
            jobs.append(pool.submit(client.generate, prompt, parse=parse, **(LENGTH | options)))
        answers = [plain, *(job.result() for job in jobs)]
    return [*answers, aborted(client, PROMPTS[8])]


def total(infos: list[dict[str, Any]], key: str) -> float:
    return sum(info.get(key, 0) for info in infos)


# -- Prometheus -----------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """Responses to a mix of requests, and the growth of every metric."""

    answers: list[dict[str, Any]]
    grown: dict[tuple[str, str], float]
    lines: list[re.Match[str]]
    generated: float

    @property
    def infos(self) -> list[dict[str, Any]]:
        return [parse_info(answer) for answer in self.answers]

    @property
    def rounds(self) -> list[dict[str, Any]]:
        return [record for info in self.infos for record in info.get("trace", ())]


def decode_lines(lines: list[str]) -> list[re.Match[str]]:
    decode = [line for line in lines if "Decode batch" in line]
    assert not [line for line in decode if "accept len" in line or "accept rate" in line]
    matches = [LINE.search(line) for line in decode]
    assert all(matches), decode
    return [match for match in matches if match]


def generated_tokens(client: Client) -> float:
    """Returns SGLang's count of output tokens."""
    found = re.findall(r"^sglang:generation_tokens_total\{.*\} (\S+)$", page(client), re.MULTILINE)
    return sum(map(float, found))


@pytest.fixture(scope="module")
def seen(watched: Watched) -> Seen:
    client = watched.client
    settle(client)
    before, own_before = samples(client), generated_tokens(client)
    num_lines = len(watched.lines())
    answers = mixed_requests(client)
    answers.append(client.generate(PROMPTS[9], parse=ACCEPT_SOME, **LENGTH))
    client.wait_idle()
    return Seen(
        answers,
        growth(samples(client), before),
        decode_lines(watched.lines()[num_lines:]),
        generated_tokens(client) - own_before,
    )


def test_every_metric_is_there_from_the_start(watched: Watched):
    found = {name for name, _ in samples(watched.client)}
    for metric in METRICS:
        names = {f"{metric.name}_{part}" for part in ("bucket", "count", "sum")}
        unknown_yet = metric.is_gauge or not metric.label_values
        assert names <= found if metric.buckets else metric.name in found or unknown_yet


def test_metrics_carry_sglangs_labels(watched: Watched):
    def labels(name: str) -> dict[str, str]:
        found = re.search(rf"^sglang:{name}\{{(.*)\}} ", page(watched.client), re.MULTILINE)
        assert found
        return dict(re.findall(r'(\w+)="([^"]*)"', found[1]))

    ours = labels("parse_rounds_total")
    assert ours == labels("max_total_num_tokens")
    assert {"model_name", "tp_rank"} <= set(ours)


@pytest.mark.usefixtures("seen")
def test_the_dashboard_finds_its_metrics(watched: Watched):
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page(watched.client)):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    unseen = {PREFIX + metric.name for metric in METRICS if metric.is_gauge}
    unseen |= {"sglang:num_retracted_requests_total", "sglang:num_aborted_requests_total"}
    missing = {found.series for found in selectors()} - set(labels)
    assert missing <= unseen
    for found in selectors():
        if found.series not in missing:
            assert found.labels - {"priority"} <= labels[found.series], found.series


def test_counters_equal_the_sums_of_the_responses(seen: Seen):
    grown, infos = seen.grown, seen.infos
    assert grown["drafted_tokens_total", ""] == total(infos, "drafted_tokens") > 100
    assert grown["accepted_tokens_total", ""] == total(infos, "accepted_tokens") > 20
    assert grown["rounds_total", ""] == total(infos, "rounds") > 20
    assert grown["kv_truncated_drafts_total", ""] == total(infos, "kv_truncated_drafts")
    assert grown["faults_total", ""] == 0
    for mode in ("parse", "plain"):
        own = [info for info in infos if info["mode"] == mode]
        assert grown["target_tokens_total", mode] == total(own, "target_tokens") > 20


def test_accepted_and_target_written_tokens_are_all_of_the_output(seen: Seen):
    output = sum(answer["meta_info"]["completion_tokens"] for answer in seen.answers)
    written = sum(seen.grown["target_tokens_total", mode] for mode in ("parse", "plain"))
    assert seen.grown["accepted_tokens_total", ""] + written == output == seen.generated


def test_requests_and_fallbacks_by_reason(seen: Seen):
    # A request of the mode "parse" that drafted nothing has a reason, too.
    reasons = Counter(info["reason"] if info["mode"] == "plain" else None for info in seen.infos)
    assert set(FALLBACKS) < set(reasons)
    assert seen.grown["requests_total", ""] == reasons.pop(None) > 10
    counted = {
        label: value
        for (name, label), value in seen.grown.items()
        if name == "plain_requests_total" and value
    }
    assert counted == reasons


def test_stage_seconds(seen: Seen):
    for stage in ("prefill", "draft", "verify", "decode"):
        from_responses = total(seen.infos, f"{stage}_ms") / 1e3
        rounding = 1e-6 * len(seen.infos)
        assert seen.grown["stage_seconds_total", stage] == pytest.approx(
            from_responses, abs=rounding
        )
        assert from_responses > 0


def test_the_comparison_reads_stage_times(watched: Watched):
    client = watched.client
    server = Remote("parse", client.url)
    before = server_totals(server)
    trace = {"trace": True}
    infos = [parse_info(client.generate(PROMPTS[0], parse=trace, **LENGTH)) for _ in range(3)]
    client.wait_idle()
    grown = {key: value - before.get(key, 0.0) for key, value in server_totals(server).items()}
    stages = {label: spent for (name, label), spent in grown.items() if name == STAGE_SECONDS}
    assert set(stages) == {"prefill", "draft", "verify", "decode"}
    for stage, spent in stages.items():
        from_responses = total(infos, f"{stage}_ms") / 1e3
        assert spent == pytest.approx(from_responses, abs=1e-6 * len(infos))
    # One request at a time: a pass per draft.
    records = [record for info in infos for record in info["trace"]]
    assert grown[PASSES, ""] == len(records) > 3
    assert grown[ROWS, ""] == sum(
        1 + record["prefix_ends"][-1] + sum(map(len, record["question_token_ids"]))
        for record in records
    )


def test_verify_passes_cover_one_draft_or_more(seen: Seen):
    assert 0 < seen.grown["verify_passes_total", ""] < seen.grown["rounds_total", ""]


@pytest.mark.parametrize("name", ["verdict", "accept_ratio"])
def test_histograms_equal_the_traces(seen: Seen, name: str):
    values = [
        value
        for record in seen.rounds
        for value in (
            record["verdicts"]
            if name == "verdict"
            else [record["accepted_len"] / record["prefix_ends"][-1]]
        )
    ]
    (bounds,) = (metric.buckets for metric in METRICS if metric.name == name)
    places = Counter(bisect_left(bounds, value) for value in values)
    assert len([count for count in places.values() if count]) > 2
    below = 0
    for place, bound in enumerate(bounds):
        below += places[place]
        assert seen.grown[f"{name}_bucket", str(float(bound))] == below
    assert seen.grown[f"{name}_count", ""] == seen.grown[f"{name}_bucket", "+Inf"] == len(values)
    assert seen.grown[f"{name}_sum", ""] == pytest.approx(sum(values))
    if name == "accept_ratio":
        assert len(values) == seen.grown["rounds_total", ""]
        verified = sum(record["prefix_ends"][-1] for record in seen.rounds)
        assert seen.grown["verified_tokens_total", ""] == verified


def test_one_verify_pass_per_round_of_a_single_request(watched: Watched):
    settle(watched.client)
    before = samples(watched.client)
    info = parse_info(watched.client.generate(PROMPTS[0], parse=ACCEPT_SOME, **LENGTH))
    watched.client.wait_idle()
    grown = growth(samples(watched.client), before)
    assert grown["verify_passes_total", ""] == grown["rounds_total", ""] == info["rounds"] > 1


def test_kv_slots_held(watched: Watched):
    """Compares with a probe in the scheduler, in every decode iteration."""
    client = watched.client
    settle(client)
    before = samples(client)
    with recorded_iterations(client) as iterations:
        client.generate_all(PROMPTS[:4], 4, parse=ACCEPT_SOME, **LENGTH)
        client.wait_idle()
    grown = growth(samples(client), before)
    held = [sum(request["held"] for request in iteration) for iteration in iterations]
    assert grown["kv_slots_held_count", ""] == len(held) > 5
    assert grown["kv_slots_held_sum", ""] == sum(held)
    assert max(held) > 40
    before = samples(client)
    info = client.generate(PROMPTS[0], parse={"enabled": False}, **LENGTH)
    client.wait_idle()
    grown = growth(samples(client), before)
    steps = info["meta_info"]["completion_tokens"] - 1  # the first one comes from prefill
    assert grown["kv_slots_held_sum", ""] == grown["kv_slots_held_count", ""] == steps
    # Inter-token times sum to the time from the first decode step's token to the last.
    assert grown["decode_itl_seconds_count", ""] == steps - 1
    assert 0 < grown["decode_itl_seconds_sum", ""] < info["meta_info"]["e2e_latency"]


def test_faults_are_counted(watched: Watched):
    client = watched.client
    settle(client)
    before = samples(client)
    with client.probe.fault("target-verify", "nan"):
        params = {"temperature": 0, "custom_params": {"parse": DRAFTS}, **LENGTH}
        body = {"input_ids": PROMPTS[0], "sampling_params": params}
        assert client.post("/generate", body).status_code == 500
    settle(client)
    grown = growth(samples(client), before)
    assert grown["faults_total", ""] == 1
    assert grown["requests_total", ""] == 2


def test_a_certificate_for_another_server(watched: Watched):
    """Log and metrics report mismatches, and no request is certified."""
    settle(watched.client)
    found = samples(watched.client)
    differing = {label for name, label in found if name == "certificate_mismatch"}
    assert differing == {"target", "draft", "question", "segment", "draft_tokens"}
    text = watched.log.read_text(errors="replace")
    for name in differing:
        assert f"was certified for another {name}: " in text
    info = parse_info(watched.client.generate(PROMPTS[0], max_new_tokens=2, ignore_eos=True))
    assert info["certified"] is False


def test_verdict_drift_is_reported(watched: Watched):
    """A random pair drifts: the server reports it after a window of first drafts."""
    client = watched.client
    settle(client)
    before = samples(client)
    prompts = [PROMPTS[k % len(PROMPTS)] for k in range(WINDOW)]
    client.generate_all(prompts, 16, max_new_tokens=4, ignore_eos=True)
    settle(client)
    found = samples(client)
    assert growth(found, before)["drifted_windows_total", ""] == 1
    assert found["verdict_drift", ""] > 0.3
    assert "are not those of the certificate" in watched.log.read_text(errors="replace")


def test_sglangs_acceptance_gauges_cover_parses_rounds(watched: Watched):
    """The last decode report of a single request covers its last round."""
    answer = watched.client.generate(PROMPTS[0], parse=ACCEPT_SOME, **LENGTH)
    watched.client.wait_idle()
    last = parse_info(answer)["trace"][-1]
    gauges = dict(
        re.findall(r"^sglang:(spec_accept_\w+)\{.*\} (\S+)$", page(watched.client), re.MULTILINE)
    )
    rejected = last["draft_token_ids"][last["accepted_len"] :]
    pairs = zip(rejected, last["bonus_token_ids"], strict=False)
    num_matched = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    assert float(gauges["spec_accept_length"]) == last["accepted_len"] + num_matched + 1
    assert float(gauges["spec_accept_rate"]) == pytest.approx(
        last["accepted_len"] / len(last["draft_token_ids"])
    )


def sglangs(client: Client, name: str) -> float:
    found = re.findall(rf"^sglang:{name}\{{.*\}} (\S+)$", page(client), re.MULTILINE)
    return sum(map(float, found))


def test_sglangs_own_counts(watched: Watched):
    """Of requests and their tokens, whatever ends an answer."""
    client, names = watched.client, ("num_requests_total", "generation_tokens_total")
    limits = [LENGTH, {"max_new_tokens": 1}, {"max_new_tokens": 0}, {"stop": ["1", "2", " "]}, {}]
    limits.append({"max_new_tokens": 40, "ignore_eos": True, "stop_token_ids": [*range(3, 300, 7)]})
    settle(client)
    before = [sglangs(client, name) for name in names]
    answers = [
        client.generate(prompt, parse=ACCEPT_SOME, **limit)
        for prompt, limit in zip(PROMPTS, limits, strict=False)
    ]
    lengths = [answer["meta_info"]["completion_tokens"] for answer in answers]
    assert lengths == [len(answer["output_ids"]) for answer in answers]
    settle(client)  # one more, of two tokens
    grown = [sglangs(client, name) - old for name, old in zip(names, before, strict=True)]
    assert grown == [len(answers) + 1, sum(lengths) + 2]


def test_one_rank_publishes(two_ranks: Client):
    client, watched = two_ranks, Watched(two_ranks, two_ranks.probe.folder.with_suffix(".log"))
    settle(client)
    before, num_lines = samples(client), len(watched.lines())
    infos = [
        parse_info(answer)
        for answer in client.generate_all(PROMPTS[:4], 4, parse=ACCEPT_SOME, **LENGTH)
    ]
    client.wait_idle()
    grown = growth(samples(client), before)
    assert grown["drafted_tokens_total", ""] == total(infos, "drafted_tokens") > 20
    assert grown["verdict_count", ""] == sum(
        len(record["verdicts"]) for info in infos for record in info["trace"]
    )
    ranks = re.findall(r'^sglang:parse_.*tp_rank="(\d)"', page(client), re.MULTILINE)
    assert set(ranks) == {"0"}
    lines = decode_lines(watched.lines()[num_lines:])
    assert printed(lines, "drafted") == total(infos, "drafted_tokens")


# -- the decode log line --------------------------------------------------------


def printed(lines: list[re.Match[str]], name: str) -> int:
    return sum(int(line[name]) for line in lines)


def assert_lines_add_up(lines: list[re.Match[str]], infos: list[dict[str, Any]]) -> None:
    assert printed(lines, "rounds") == total(infos, "rounds") > 10
    assert printed(lines, "drafted") == total(infos, "drafted_tokens")
    assert printed(lines, "accepted") == total(infos, "accepted_tokens")
    assert printed(lines, "target") == total(infos, "target_tokens")
    for line in lines:
        ratio = int(line["accepted"]) / max(1, int(line["verified"]))
        assert line["accept_ratio"] == f"{ratio:.2f}"
        phases = sum(int(line[name]) for name in ("drafting", "verifying", "decoding", "plain"))
        assert phases <= int(line["running"])
    for name in ("drafting", "verifying", "plain"):
        assert printed(lines, name) > 0


def test_decode_lines_add_up(seen: Seen):
    assert_lines_add_up(seen.lines, seen.infos)
    assert printed(seen.lines, "decoding") == 0  # drafting resumes at once


def test_the_line_does_not_need_metrics(unwatched: Watched):
    """A server without ``--enable-metrics`` has no ``/metrics``."""
    client = unwatched.client
    settle(client)
    num_lines = len(unwatched.lines())
    answers = mixed_requests(client)
    answers.append(client.generate(PROMPTS[9], **LENGTH))
    client.wait_idle()
    lines = decode_lines(unwatched.lines()[num_lines:])
    assert_lines_add_up(lines, [parse_info(answer) for answer in answers])
    assert printed(lines, "decoding") == 0
    assert HTTP.get(f"{client.url}/metrics", timeout=60).status_code == 404
    assert server_totals(Remote("parse", client.url)) == {}
