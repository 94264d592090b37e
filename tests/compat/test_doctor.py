"""``sglang-parse doctor`` before a server starts: every check, passing and failing.

tests/e2e/test_demo_programs.py runs it against a server.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import openai
import pytest
import torch
from safetensors.torch import save_file

from sglang_parse import cli, patches
from sglang_parse.client.records import Answer, BenchError, BenchRun, Variant
from sglang_parse.client.servers import free_ports
from sglang_parse.core.request import NAN_IN_TARGET
from sglang_parse.core.simulation import ENV_VAR as SIMULATE
from sglang_parse.doctor import machine, memory, served, start
from sglang_parse.doctor.finding import (
    FAILS,
    NOT_CHECKED,
    OK,
    WARNING,
    Check,
    Finding,
    run_check,
)
from sglang_parse.doctor.settings import DoctorSettings
from sglang_parse.shapes.shape import Shape
from sglang_parse.startup import compat
from support.calibration import demo_fingerprint, write_certificate
from support.demo_pair import DEMO
from support.heads import HeadShape, write_head
from support.models import load_model
from support.mtp import MTP
from support.random_pair import PairShape, make_pair

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("clean_environment")]
HEAD = DEMO / "eagle3"
CONFIG = DEMO / "target" / "config.json"
(PORT,) = free_ports(1)


def flags(**others: object) -> list[str]:
    """Flags of the demo pair's server on a CPU, with changes; None drops a flag."""
    values = {
        "--model-path": DEMO / "target",
        "--speculative-algorithm": "PARSE",
        "--speculative-draft-model-path": DEMO / "draft",
        "--parse-question": DEMO / "question.json",
        "--device": "cpu",
        "--attention-backend": "torch_native",
        "--dtype": "float32",
        "--port": PORT,
    }
    values |= {f"--{name.replace('_', '-')}": value for name, value in others.items()}
    return [str(w) for name, value in values.items() if value is not None for w in (name, value)]


def check(**others: object) -> dict[str, Finding]:
    """Findings by name."""
    return made(start.Start(flags(**others)).checks())


def made(checks: Iterable[Check]) -> dict[str, Finding]:
    return {name: run_check(name, check) for name, check in checks}


@pytest.fixture(scope="module")
def good() -> dict[str, Finding]:
    return check()


def changed(source: Path, folder: Path, **config: object) -> Path:
    """A copy of a model with other values in its config.json."""
    shutil.copytree(source, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def test_a_server_that_works(good: dict[str, Finding]):
    assert tuple(good) == ("flags", "port", *start.NAMES[1:])
    assert {finding.status for finding in good.values()} == {OK}
    assert all(finding.found and not finding.fix for finding in good.values())


def test_paths_with_spaces_and_letters_of_other_languages(tmp_path: Path):
    folder = tmp_path / "Modèles de démo = 模型"
    folder.symlink_to(DEMO)
    paths = {"model_path": folder / "target", "speculative_draft_model_path": folder / "draft"}
    found = check(**paths, parse_question=folder / "question.json")
    assert {finding.status for finding in found.values()} == {OK}
    assert found["settings"].found == f"--parse-question {folder}/question.json"


# -- this machine -----------------------------------------------------------------


def test_machine(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["doctor", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["works"] is True
    found = {entry["check"]: entry for entry in printed["findings"]}
    assert list(found) == ["versions", "plugin", "patches"]
    assert f"sglang {metadata.version('sglang')}" in found["versions"]["found"]


def test_versions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compat, "pinned_version", lambda: "0.0.1")
    line = made(machine.checks())["versions"]
    assert (line.status, line.fix.partition("'")[0]) == (FAILS, "pip install ")
    assert "expected 0.0.1" in line.found


def test_a_hidden_plugin(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "other, another")
    line = made(machine.checks())["plugin"]
    assert line.status == FAILS
    assert "SGLANG_PLUGINS is 'other, another', which hides" in line.found
    assert line.fix.startswith("add parse to it")
    monkeypatch.setenv("SGLANG_PLUGINS", "other, parse")
    assert made(machine.checks())["plugin"].status == OK


def test_a_missing_plugin(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine.metadata, "entry_points", lambda **_: ())
    line = made(machine.checks())["plugin"]
    assert (line.status, line.fix.partition(" with")[0]) == (FAILS, "pip install sglang-parse")


def test_a_plugin_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "get_spec", lambda _: None)
    line = made(machine.checks())["plugin"]
    assert (line.status, "Failed to load plugin" in line.fix) == (FAILS, True)


def test_a_patched_attribute_that_is_gone(monkeypatch: pytest.MonkeyPatch):
    gone = compat.Symbol("sglang.srt.no_such_thing", "a.py:1")
    monkeypatch.setattr(patches, "symbols", lambda: [gone])
    line = made(machine.checks())["patches"]
    assert (line.status, line.fix) == (FAILS, f"reinstall sglang=={compat.pinned_version()}")
    assert "no_such_thing: found nothing" in line.found


def test_patches(monkeypatch: pytest.MonkeyPatch):
    first = patches.needed()[0]
    monkeypatch.setattr(type(first), "is_applied", lambda _: False, raising=False)
    line = made(machine.checks())["patches"]
    assert line.status == FAILS
    assert first.name in line.found


# -- the server some flags would start --------------------------------------------


def test_every_bad_flag_is_listed_and_the_rest_is_checked():
    bad = {"no_such_flag": 1, "another": "x y", "tp_size": "two", "parse_selection": "any"}
    found = check(**bad, parse_threshold=7, parse_max_itl_ratio=-1.0)
    line = found.pop("flags")
    assert line.status == FAILS
    expected = (
        *("unrecognized arguments: --no-such-flag 1", "unrecognized arguments: --another x y"),
        *("argument --tp-size/--tensor-parallel-size: invalid int value", "--parse-selection: inv"),
        *("--parse-threshold is 7.0; use a number from 0", "--parse-max-itl-ratio is -1.0; use a"),
    )
    for text, printed in zip(expected, line.found.splitlines(), strict=True):
        assert text in printed
    assert {*found} == {"port", *start.NAMES} - {"flags"}
    assert {one.status for one in found.values()} == {OK}


def test_a_server_without_a_model():
    (line,) = check(model_path=None, no_such_flag=1).values()
    assert (line.check, line.status) == ("flags", FAILS)
    assert line.found.splitlines() == [
        "unrecognized arguments: --no-such-flag 1",
        "the following arguments are required: --model-path/--model",
    ]


def test_algorithm():
    line = check(speculative_algorithm=None)["algorithm"]
    assert (line.status, line.fix) == (FAILS, "use PARSE")


def test_settings(good: dict[str, Finding], monkeypatch: pytest.MonkeyPatch):
    assert good["settings"].found == f"--parse-question {DEMO / 'question.json'}"
    found = check(pp_size=2)
    assert found["settings"].status == FAILS
    assert (found["settings"].found, found["start"].status) == ("--pp-size is 2", FAILS)
    monkeypatch.setenv(SIMULATE, "0.5")
    assert check()["settings"].status == WARNING


def test_a_used_port(good: dict[str, Finding]):
    assert good["port"].found == f"{PORT} is free"
    with socket.create_server(("127.0.0.1", 0)) as other:
        used = other.getsockname()[1]
        line = check(port=used)["port"]
    assert (line.status, line.found.partition(":")[0]) == (FAILS, f"--port is {used}")
    assert line.fix == "use a free port, or stop the other server"


def test_the_port_of_a_running_server_may_be_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(served.Served, "checks", lambda _: iter(()))
    with socket.create_server(("127.0.0.1", 0)) as other:
        used = other.getsockname()[1]
        url = f"http://127.0.0.1:{used}"
        assert cli.main(["doctor", "--json", "--url", url, *flags(port=used)]) == 0
    names = [one["check"] for one in json.loads(capsys.readouterr().out)["findings"]]
    assert "port" not in names
    assert {*start.NAMES} <= {*names}


def test_device(good: dict[str, Finding]):
    assert good["device"].found.startswith("cpu: ")
    line = check(device="cuda", attention_backend="triton")["device"]
    assert line.status == FAILS
    assert "this machine has 0" in line.found


def test_attention(good: dict[str, Finding]):
    assert (
        "torch_native, without overlap; layout mask of the verify pass" in good["attention"].found
    )
    forced = check(parse_layout="alias")["attention"]
    assert "layout alias of the verify pass, because --parse-layout asks for it" in forced.found
    line = check(device="cuda", attention_backend="fa3", page_size=16)["attention"]
    assert line.status == FAILS
    assert line.fix.startswith("use --page-size 1")


def test_models(good: dict[str, Finding], tmp_path: Path):
    assert good["models"].found.startswith("target Qwen3ForCausalLM, 16 layers; draft Qwen3")
    found = check(speculative_draft_model_path=tmp_path)
    assert (found["models"].status, found["question"].status) == (FAILS, OK)
    assert "no config.json" in found["models"].found
    of_pair = start.NAMES[start.NAMES.index("tokenizers") : start.NAMES.index("question")]
    assert {found[name].status for name in of_pair} == {NOT_CHECKED}


def test_what_can_draft_is_named_without_a_draft_model():
    found = check(speculative_draft_model_path=None)
    usual = "can draft for Qwen3: Qwen3-0.6B, Qwen3-1.7B"
    assert (found["models"].status, found["tokenizers"].status) == (OK, NOT_CHECKED)
    assert f"draft none ({usual})" in found["models"].found
    drafts = f"drafts are texts and copies of the prompt ({usual})"
    assert drafts in found["tokenizers"].found


def test_draft_heads_that_the_ranks_cannot_split(tmp_path: Path):
    draft = changed(DEMO / "draft", tmp_path / "d", num_attention_heads=3, num_key_value_heads=3)
    line = check(speculative_draft_model_path=draft, tp_size=2)["models"]
    assert (line.status, "3 attention heads" in line.fix) == (FAILS, True)


def test_tokenizers(good: dict[str, Finding], tmp_path: Path):
    assert good["tokenizers"].found == "the same 384 entries"
    draft = changed(DEMO / "draft", tmp_path / "draft")
    path = draft / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.get)[100:102]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(content))
    line = check(speculative_draft_model_path=draft)["tokenizers"]
    assert (line.status, line.fix) == (FAILS, "use a draft model with the target's tokenizer")


def test_vocabularies(good: dict[str, Finding], tmp_path: Path):
    assert good["vocabularies"].found == "384 tokens each"
    draft = changed(DEMO / "draft", tmp_path / "padded", vocab_size=999)
    line = check(speculative_draft_model_path=draft)["vocabularies"]
    assert line.found == "target 384, draft 999 tokens; padding behind the tokenizer's 384"
    draft = changed(DEMO / "draft", tmp_path / "draft", vocab_size=99)
    line = check(speculative_draft_model_path=draft)["vocabularies"]
    assert (line.status, "99 tokens" in line.found) == (FAILS, True)


def test_context_lengths(good: dict[str, Finding], tmp_path: Path):
    assert good["context lengths"].found == "target 4,096, draft 4,096 tokens"
    draft = changed(DEMO / "draft", tmp_path / "draft", max_position_embeddings=64)
    line = check(speculative_draft_model_path=draft)["context lengths"]
    assert (line.status, "or --context-length 64" in line.fix) == (FAILS, True)


def test_draft_forward(tmp_path: Path):
    draft = changed(DEMO / "draft", tmp_path / "draft", pard_token=7)
    line = check(speculative_draft_model_path=draft)["draft forward"]
    assert line.found == "up to 8 tokens, by mask token 7"
    draft = changed(DEMO / "draft", tmp_path / "none", pard_token=None)
    line = check(speculative_draft_model_path=draft, parse_draft_parallel_tokens=4)["draft forward"]
    assert (line.status, "use 1, or a draft" in line.fix) == (FAILS, True)


def test_head():
    continued = {"parse_eagle3_path": HEAD}
    assert check(**continued)["EAGLE-3 head"].found.endswith("7 tokens ahead")
    line = check(**continued, speculative_eagle_topk=4)["EAGLE-3 head"]
    assert (line.status, line.found) == (FAILS, "--speculative-eagle-topk is 4")


def test_mtp_layer(good: dict[str, Finding], tmp_path: Path):
    """It fits, or could be used."""
    alone = {"model_path": MTP["glm-4.5"].target(tmp_path), "parse_question": None}
    alone["speculative_draft_model_path"] = None
    line = check(**alone)["MTP layer"]
    assert (line.status, line.found.endswith("which can draft: --parse-mtp own")) == (OK, True)
    line = check(**alone, parse_mtp="own")["MTP layer"]
    assert (line.status, line.found) == (OK, "own fits the target; 7 tokens ahead")
    assert "MTP layer" not in good


def test_size_ratio(good: dict[str, Finding], tmp_path: Path):
    numbers = sum(p.numel() for p in load_model(DEMO / "target").parameters())
    assert good["size ratio"].found.startswith(f"{numbers:,} and ")
    assert "16.6 to 1" in good["size ratio"].found
    target, draft = make_pair(tmp_path, PairShape(num_layers=1))
    line = check(model_path=target, speculative_draft_model_path=draft)["size ratio"]
    assert (line.status, line.fix.partition(",")[0]) == (WARNING, "a smaller draft")


def test_memory(good: dict[str, Finding], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of shapes without weights, on a GPU that has room and on one where little is left."""
    assert good["memory"].found.startswith("0.00 GiB (weights of draft 0.00 GiB) and 2 KiB of each")
    target = Shape.read("14b").write_model(tmp_path)
    draft = Shape.read("0.6b").write_model(tmp_path, pard_token=9)
    save_file({"norm": torch.ones(2)}, Path(draft) / "model.safetensors")
    given = {"model_path": target, "speculative_draft_model_path": draft, "parse_question": None}
    given |= {"device": "cuda", "attention_backend": "triton", "dtype": "bfloat16"}
    monkeypatch.setattr(memory, "get_device_memory_capacity", lambda _: 80 << 10)
    line = check(**given, mem_fraction_static=0.9)["memory"]
    assert line.status == OK
    weights = f"0.00 GiB (weights of {Path(draft).name} 0.00 GiB)"
    assert line.found.startswith(f"{weights} and 112 KiB of each KV slot within --mem-fraction-")
    _, _, beside = line.found.partition("; ")
    parts = re.findall(r"([a-z ]+) (0\.\d\d|1\.50) GiB(?=[,)])", beside)
    assert [name.strip() for name, _ in parts[:2]] == ["logits of a pass", "logits of blocks"]
    graphs = {f"graphs of {name}" for name in ("passes", "draft steps", "draft prefills", "blocks")}
    assert graphs == {name.strip() for name, _ in parts[2:]}
    line = check(**given, mem_fraction_static=0.96)["memory"]
    assert (line.status, "where 3.20 GiB are left" in line.found) == (WARNING, True)
    assert line.fix.startswith("a smaller --mem-fraction-static, --context-length, --max-running")
    pieces = check(**given, mem_fraction_static=0.96, cuda_graph_backend_decode="disabled")
    assert "graphs of" not in pieces["memory"].found


def test_weights_that_do_not_fit(monkeypatch: pytest.MonkeyPatch):
    weights = sum(p.numel() for p in load_model(DEMO / "target").parameters())
    monkeypatch.setattr(memory, "get_device_memory_capacity", lambda _: weights * 4 / 2**20)
    line = check(mem_fraction_static=0.99)["memory"]
    assert (line.status, line.fix) == (
        FAILS,
        "a larger --mem-fraction-static or --tp-size, or smaller models",
    )


def test_question(good: dict[str, Finding]):
    assert good["question"].found == (
        "partial 12, complete 13 tokens; verdict tokens 'yes' (309) and 'no' (271)"
    )
    line = check(parse_question="llama3")["question"]
    assert (line.status, "tokens" in line.found) == (FAILS, True)
    exact = check(parse_verification="token", parse_question=None)["question"]
    assert exact.found == "none with --parse-verification token"
    lines = check(parse_judge="likelihood", parse_question=None)
    assert lines["question"].found == "none with --parse-judge likelihood"
    assert (lines["judge"].status, lines["judge"].found) == (OK, "likelihood")


@pytest.mark.parametrize("of_this_target", [True, False])
def test_judge(tmp_path: Path, of_this_target: bool):
    """A head, and a question for complete answers; a head of another target."""
    shape = HeadShape("worst-token", (4, 9), json.loads(CONFIG.read_text())["hidden_size"])
    target = DEMO / ("target" if of_this_target else "draft")
    head = write_head(tmp_path, (target, DEMO / "draft"), shape, 1.0)
    line = check(parse_judge=head)["judge"]
    assert (line.status == OK) == of_this_target
    wanted = "head+question: worst-token, layers 4, 9"
    assert (line.found == wanted) if of_this_target else ("trained for target" in line.found)


def test_pass(good: dict[str, Finding]):
    assert good["verify pass"].found.startswith("at most 337 rows")  # 1 + 128 + 16 x 13
    line = check(chunked_prefill_size=256)["verify pass"]
    assert (line.status, "--parse-max-prefixes" in line.fix) == (WARNING, True)


def certificate_for(folder: Path, **others: Any) -> Path:
    """What calibrate would have written for the demo pair's server, or for one with another
    fingerprint."""
    return write_certificate(folder, fingerprint=demo_fingerprint().model_dump() | others)


def test_certificate(good: dict[str, Finding], tmp_path: Path):
    assert "certificate" not in good
    path = certificate_for(tmp_path)
    line = check(parse_threshold=path)["certificate"]
    assert (line.status, line.found) == (OK, f"{path} was made for this server: 0.9")
    other = certificate_for(tmp_path / "other", draft_tokens=7)  # a file is read once
    line = check(parse_threshold=other)["certificate"]
    assert (line.status, "draft_tokens 7, here 128" in line.found) == (WARNING, True)
    assert line.fix == "run sglang-parse calibrate for this one"
    line = check(parse_threshold=tmp_path / "no.json")["flags"]
    assert (line.status, "no.json" in line.found) == (FAILS, True)


def test_exit_code_and_table(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["doctor", *flags(parse_question="/no/such/file")]) == 1
    printed = capsys.readouterr().out
    assert "fails" in printed
    assert "Fix: give --parse-question a JSON file" in " ".join(printed.split())


def test_another_programs_unknown_flags_are_an_error(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        cli.main(["compare", "--model-path", "x"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --model-path x" in capsys.readouterr().err


# -- a running server, without one ------------------------------------------------


def test_no_server(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["doctor", "--json", "--url", "http://127.0.0.1:9"]) == 1
    (line,) = json.loads(capsys.readouterr().out)["findings"]
    assert (line["check"], line["status"]) == ("server", FAILS)


def test_another_version_serves(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(served.Remote, "check_alive", lambda _: None)
    page = httpx.Response(200, json={"version": "0.0.1"}, request=httpx.Request("GET", "http://x"))
    monkeypatch.setattr(served.httpx, "get", lambda *_, **__: page)
    line = run_check("server", served.Served(DoctorSettings()).read_info)
    assert (line.status, "SGLang 0.0.1" in line.found) == (WARNING, True)


RECORD = {
    **{"verdicts": [0.9, 0.2], "verdict_mass": [0.99, 0.97], "threshold": 0.5},
    **{"draft_token_ids": [*range(10)], "prefix_ends": [8, 10], "accepted_len": 8},
    **{"bonus_token_ids": [99], "target_token_ids": [0, 1, 2, 3, *7 * [99]]},
}
COUNTERS = {
    **{"mode": "parse", "rounds": 1, "skipped_drafts": 0, "drafted_tokens": 10},
    **{"accepted_tokens": 8, "matched_tokens": 0, "draft_ms": 100.0, "verify_ms": 50.0},
    **{"matched_prefixes": 1, "rejected_matched_prefixes": 0},
}


def answered(**parse: Any) -> served.Served:
    """A server that has answered one prompt with these values in meta_info."""
    meta = COUNTERS | {"trace": [RECORD]} | parse
    ours, plain = (Answer(0, "", 10, ms, {"parse": [meta]}) for ms in (200.0, 500.0))
    drafted = [ours] if meta["rounds"] else []
    return served.Served(DoctorSettings(), with_parse=[ours], drafted=drafted, plain=[plain])


def statuses(**parse: Any) -> dict[str, Finding]:
    found = answered(**parse)
    names = served.NAMES[1:-1]
    checks = [getattr(found, name.replace(" ", "_")) for name in names]
    described = run_check("answers", lambda: found.described("1 of 1 prompts answered"))
    return {"answers": described, **made(zip(names, checks, strict=True))}


def test_good_answers():
    found = statuses()
    assert {one.status for one in found.values()} == {OK}
    assert found["verdict mass"].found.startswith("mean 0.980, smallest 0.970 of the probability")
    assert found["matched prefixes"].found.startswith("0 of 1 prefixes")
    assert found["acceptance"].found.startswith(
        "80% of draft tokens accepted, 80% of the output; verdicts"
    )
    # Plain takes 50 ms a token: r = 10 / 50, v = 5 / 50, a = 0.8; PARSE takes 20.
    assert found["speedup"].found.startswith("2.50x over plain decoding")
    assert "at most 2.00x = 1 / (r 0.20 + v 0.10 + 1 - a 0.80)" in found["speedup"].found
    assert "Largest cost: drafting (0.20; a smaller" in found["speedup"].found


@pytest.mark.parametrize(
    ("ratios", "status", "text"),
    [
        ({}, OK, "none of PARSE's own"),
        ({"target: 16 rows": 2.5}, OK, "as fast as in pieces: target: 16 rows 2.5x"),
        ({"target: 16 rows": 2.5, "blocks": 0.0}, WARNING, "2.5x; switched off at start: blocks"),
        (None, NOT_CHECKED, "without --enable-metrics"),
    ],
)
def test_cuda_graphs(ratios: dict | None, status: str, text: str, monkeypatch: pytest.MonkeyPatch):
    """What the server has found of them at its start."""
    one = answered()
    one.info["enable_metrics"] = ratios is not None
    lines = (f'{{engine_type="unified",graph="{k}"}} {v}' for k, v in (ratios or {}).items())
    page = "\n".join(["# HELP", *(f"sglang:parse_graph_speedup{line}" for line in lines), ""])
    answer = httpx.Response(200, text=page, request=httpx.Request("GET", "http://x"))
    monkeypatch.setattr(served.httpx, "get", lambda *_, **__: answer)
    found = run_check("CUDA graphs", one.cuda_graphs)
    assert found.status == status
    assert text in found.found


def test_a_setting_that_loses_to_token_mode():
    """With the same drafts, by tokens per target forward; the prefill writes the first of ten."""
    good = statuses()["refusals"]
    assert good.found == (
        "9.0 tokens per target forward; token mode: 5.0 with these drafts; "
        "one refusal in 9 tokens, 0.0 decode steps each"
    )
    costly = RECORD | {"accepted_len": 0}
    bad = statuses(trace=[costly])["refusals"]
    assert (bad.status, bad.found) == (
        WARNING,
        "1.0 tokens per target forward; token mode: 5.0 with these drafts; "
        "one refusal in 9 tokens, 8.0 decode steps each",
    )
    assert bad.fix.startswith("leave out --parse-segment")
    suspended = statuses(trace=[costly], skipped_drafts=8)["refusals"]  # not the refusal's
    assert "0.0 decode steps each" in suspended.found


def test_bad_answers():
    low = RECORD | {"verdicts": [0.9], "verdict_mass": [0.1]}
    assert statuses(trace=[low])["verdict mass"].status == WARNING
    assert statuses(mode="plain", reason="multimodal input")["answers"].status == WARNING
    assert statuses(simulated=0.5)["answers"].status == WARNING
    suspended = statuses(rounds=0, skipped_drafts=3, trace=[], reason="drafting suspended: slow")
    assert suspended["answers"].status == WARNING
    assert "nothing was drafted: drafting suspended: slow" in suspended["answers"].found
    assert {suspended[name].status for name in served.NAMES[1:-1]} == {NOT_CHECKED}


@pytest.mark.parametrize(
    ("matched", "fix"),
    [
        # The target would have written the draft: no draft model would be better.
        ((4, 4), "--parse-judge likelihood, or a head of sglang-parse train-judge; another --par"),
        ((4, 1), "another --parse-threshold, or another --parse-judge"),
        ((0, 0), "a better draft model"),
    ],
)
def test_advice_follows_the_evidence(matched: tuple[int, int], fix: str):
    counters = dict(zip(("matched_prefixes", "rejected_matched_prefixes"), matched, strict=True))
    found = statuses(accepted_tokens=1, **counters)
    assert (found["acceptance"].status, found["acceptance"].fix.startswith(fix)) == (WARNING, True)
    assert f"decode (0.90; {fix}" in found["speedup"].found
    contradicted = matched == (4, 4)
    line = found["matched prefixes"]
    assert (line.status == WARNING, bool(line.fix)) == (contradicted, contradicted)
    if contradicted:
        assert line.found == (
            "4 of 4 prefixes that the target would have written are rejected: the target would "
            "have written what the judge refuses, so the question does not work for this model"
        )


class Answering:
    """A server's answers on a clock of their own; ``drafts`` whether it drafts by itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, seconds: float, drafts: bool = True):
        self.seconds, self.drafts, self.now = seconds, drafts, 0.0
        self.asked: list[dict[str, Any]] = []
        info = {"version": compat.pinned_version(), "speculative_algorithm": "PARSE"}
        info |= {"model_path": "far/away", "speculative_draft_model_path": "d"}
        page = httpx.Response(
            200, json=info | {"max_total_num_tokens": 9}, request=httpx.Request("GET", "http://x")
        )
        monkeypatch.setattr(served.Remote, "check_alive", lambda _: None)
        monkeypatch.setattr(served.httpx, "get", lambda *_, **__: page)
        monkeypatch.setattr(served.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(served, "ask", self.ask)
        monkeypatch.setattr(cli, "end_on_sigterm", lambda: None)

    def ask(self, _server: Any, _items: Any, indices: list[int], *, asking: Any) -> BenchRun:
        options = asking.parse
        self.asked.append(options)
        took = self.seconds * asking.max_tokens / served.MIN_TOKENS
        self.now += took
        drafts = self.drafts or options.get("drafting") == "always"
        meta = COUNTERS | {"trace": [RECORD]} | ({} if drafts else {"rounds": 0, "trace": []})
        answer = Answer(indices[0], "", asking.max_tokens, 1e3 * took, {"parse": [meta]})
        return BenchRun(Variant("x"), -1, 1, 1.0, (answer,))


def doctor(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, lines by name, progress."""
    code = cli.main(["doctor", "--json", "--url", "http://x", *words])
    printed = capsys.readouterr()
    return code, {one["check"]: one for one in json.loads(printed.out)["findings"]}, printed.err


def test_a_server_that_has_suspended_drafting_is_asked_for_drafts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    answering = Answering(monkeypatch, seconds=0.01, drafts=False)
    code, found, progress = doctor(capsys, "--requests", "2")
    assert (code, found["answers"]["status"]) == (0, WARNING)
    assert "2 of 2 prompts answered; nothing was drafted" in found["answers"]["found"]
    assert found["acceptance"]["found"].startswith("80% of draft tokens accepted")
    assert answering.asked[2:] == [served.TRACED, served.FORCED, served.OFF] * 2
    assert "1 of 2 prompts answered" in progress


@pytest.mark.parametrize("seconds", [0.1, 6.0, 40.0])
def test_the_budget_is_kept_and_what_there_is_is_said(
    seconds: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """``seconds`` for 32 tokens: all prompts of a fast server, one of a slow one."""
    answering = Answering(monkeypatch, seconds=seconds)
    code, found, _ = doctor(capsys, "--budget", "100")
    assert code == 0
    answered = {0.1: 6, 6.0: 3, 40.0: 1}[seconds]
    assert found["answers"]["found"].startswith(f"{answered} of 6 prompts answered")
    is_spent = "the budget of 100 s was spent (--budget)" in found["answers"]["found"]
    assert is_spent == (answered < 6)
    assert answering.now < 100 or answered == 1
    assert "over plain decoding" in found["speedup"]["found"]


@pytest.mark.parametrize(("ended", "code"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
@pytest.mark.parametrize("after", [1, 4])
def test_what_there_is_when_somebody_ends_it(
    ended: BaseException,
    code: int,
    after: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    answering = Answering(monkeypatch, seconds=0.01)

    def ask(*things: Any, **others: Any) -> BenchRun:
        if len(answering.asked) == after:
            raise ended
        return answering.ask(*things, **others)

    monkeypatch.setattr(served, "ask", ask)
    found_code, found, _ = doctor(capsys)
    assert found_code == code
    answered = max(0, (after - 2) // 2)
    assert found["answers"]["found"].startswith(f"{answered} of 6 prompts answered, then it was")
    assert found["acceptance"]["status"] == (OK if answered else NOT_CHECKED)
    assert found["ended"]["found"] == "not done: further prompts"


def test_a_target_that_answers_nan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """As the client quotes a server's error."""
    body = {"object": "error", "message": f"PARSE: {NAN_IN_TARGET}", "code": 500}
    answer = httpx.Response(500, request=httpx.Request("POST", "http://x"))
    error = openai.InternalServerError(f"Error code: 500 - {body}", response=answer, body=body)
    Answering(monkeypatch, seconds=0.01)
    failed = BenchError(f"a request to the server for the server failed: {error!r}")
    monkeypatch.setattr(served, "ask", Mock(side_effect=failed))
    code, found, _ = doctor(capsys)
    assert (code, found["answers"]["status"]) == (1, FAILS)
    assert found["answers"]["found"].startswith("the target answers NaN: its weights are damaged")
    assert found["answers"]["fix"].startswith("load its weights again")


def test_ended_between_two_checks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    Answering(monkeypatch, seconds=0.01)
    monkeypatch.setattr(served.Served, "is_parse", Mock(side_effect=KeyboardInterrupt))
    code, found, _ = doctor(capsys)
    assert (code, [*found]) == (130, ["server", "ended"])
    assert found["ended"]["found"] == f"not done: {', '.join(served.NAMES)}"


def test_slower_than_plain():
    slow = answered()
    slow.with_parse, slow.plain = slow.plain, slow.with_parse
    line = run_check("speedup", slow.speedup)
    assert (line.status, line.fix) == (WARNING, "a smaller or faster draft model")
