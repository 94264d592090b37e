"""``sglang-parse doctor`` before a server starts: every check, passing and failing.

tests/e2e/test_demo_programs.py runs it against a server.
"""

from __future__ import annotations

import json
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from sglang_parse import cli, patches
from sglang_parse.core.simulation import ENV_VAR as SIMULATE
from sglang_parse.doctor import machine, memory, served, start
from sglang_parse.doctor.finding import FAILS, NOT_CHECKED, OK, WARNING, Finding
from sglang_parse.startup import compat
from sglang_parse.startup.sglang_api import Symbol
from support.calibration import demo_fingerprint, write_certificate
from support.demo_pair import DEMO
from support.models import load_model
from support.random_pair import PairShape, make_pair

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("clean_environment")]
HEAD = DEMO / "eagle3"
LINES = (
    *("algorithm", "settings", "device", "attention", "models"),
    *("tokenizers", "vocabularies", "context lengths", "draft forward", "default requests"),
    *("size ratio", "memory"),
    *("question", "verify pass", "start"),
)


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
    }
    values |= {f"--{name.replace('_', '-')}": value for name, value in others.items()}
    return [str(w) for name, value in values.items() if value is not None for w in (name, value)]


def check(**others: object) -> dict[str, Finding]:
    """Findings by name."""
    return {finding.check: finding for finding in start.findings(flags(**others))}


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
    assert tuple(good) == LINES
    assert {finding.status for finding in good.values()} == {OK}
    assert all(finding.found and not finding.fix for finding in good.values())


# -- this machine -----------------------------------------------------------------


def test_machine(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["doctor", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["works"] is True
    found = {entry["check"]: entry for entry in printed["findings"]}
    assert list(found) == ["versions", "plugin", "SGLang API", "patches"]
    assert f"sglang {metadata.version('sglang')}" in found["versions"]["found"]


def test_versions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compat, "pinned_version", lambda: "0.0.1")
    (line, *_) = machine.findings()
    assert (line.status, line.fix.partition("'")[0]) == (FAILS, "pip install ")
    assert "expected 0.0.1" in line.found


def test_a_hidden_plugin(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGLANG_PLUGINS", "other, another")
    line = machine.findings()[1]
    assert line.status == FAILS
    assert "SGLANG_PLUGINS is 'other, another', which hides" in line.found
    assert line.fix.startswith("add parse to it")
    monkeypatch.setenv("SGLANG_PLUGINS", "other, parse")
    assert machine.findings()[1].status == OK


def test_a_missing_plugin(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine.metadata, "entry_points", lambda **_: ())
    line = machine.findings()[1]
    assert (line.status, line.fix.partition(" with")[0]) == (FAILS, "pip install sglang-parse")


def test_a_plugin_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "get_spec", lambda _: None)
    line = machine.findings()[1]
    assert (line.status, "Failed to load plugin" in line.fix) == (FAILS, True)


def test_sglang_api(monkeypatch: pytest.MonkeyPatch):
    gone = Symbol("sglang.srt.no_such_thing", "a.py:1")
    monkeypatch.setattr(machine, "server_symbols", lambda: [gone])
    line = machine.findings()[2]
    assert (line.status, line.fix) == (FAILS, f"reinstall sglang=={compat.pinned_version()}")
    assert "no_such_thing: found nothing" in line.found


def test_patches(monkeypatch: pytest.MonkeyPatch):
    first = next(patch for patch in patches.PATCHES if patch.is_needed())
    monkeypatch.setattr(type(first), "is_applied", lambda _: False, raising=False)
    line = machine.findings()[3]
    assert line.status == FAILS
    assert first.name in line.found


# -- the server some flags would start --------------------------------------------


def test_flags_sglang_does_not_know():
    (line,) = start.findings(flags(no_such_flag=1))
    assert (line.check, line.status) == ("flags", FAILS)
    assert "--no-such-flag" in line.found


def test_bad_values_of_parses_flags():
    (line,) = start.findings(flags(parse_threshold=7))
    assert (line.check, line.status) == ("flags", FAILS)
    assert line.found == "--parse-threshold is 7.0"
    assert line.fix.startswith("use a number from 0")


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
    assert "no config.json" in found["models"].fix
    assert {found[name].status for name in start.PAIR_LINES} == {NOT_CHECKED}


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
    draft = changed(DEMO / "draft", tmp_path / "draft", vocab_size=999)
    line = check(speculative_draft_model_path=draft)["vocabularies"]
    assert (line.status, "999 tokens" in line.found) == (FAILS, True)


def test_context_lengths(good: dict[str, Finding], tmp_path: Path):
    assert good["context lengths"].found == "target 4,096, draft 4,096 tokens"
    draft = changed(DEMO / "draft", tmp_path / "draft", max_position_embeddings=64)
    line = check(speculative_draft_model_path=draft)["context lengths"]
    assert (line.status, "or --context-length 64" in line.fix) == (FAILS, True)


def test_default_requests(good: dict[str, Finding], tmp_path: Path):
    assert good["default requests"].status == OK
    target = changed(DEMO / "target", tmp_path / "target")
    (target / "generation_config.json").write_text('{"repetition_penalty": 1.05}')
    line = check(model_path=target)["default requests"]
    assert (line.status, "--sampling-defaults openai" in line.fix) == (WARNING, True)
    line = check(model_path=target, sampling_defaults="openai")["default requests"]
    assert line.status == OK


def test_draft_forward(tmp_path: Path):
    draft = changed(DEMO / "draft", tmp_path / "draft", pard_token=7)
    line = check(speculative_draft_model_path=draft)["draft forward"]
    assert line.found == "up to 8 tokens, by mask token 7"
    draft = changed(DEMO / "draft", tmp_path / "none", pard_token=None)
    line = check(speculative_draft_model_path=draft, parse_draft_parallel_tokens=4)["draft forward"]
    assert (line.status, "use 1, or a draft" in line.fix) == (FAILS, True)


def test_head():
    continued = {"parse_decode_accelerator": "eagle3", "parse_eagle3_path": HEAD}
    assert check(**continued)["EAGLE-3 head"].found.endswith("3 tokens ahead")
    line = check(**continued, speculative_eagle_topk=4)["EAGLE-3 head"]
    assert (line.status, line.found) == (FAILS, "--speculative-eagle-topk is 4")


def test_size_ratio(good: dict[str, Finding], tmp_path: Path):
    assert "16.6 to 1" in good["size ratio"].found
    target, draft = make_pair(tmp_path, PairShape(num_layers=1))
    line = check(model_path=target, speculative_draft_model_path=draft)["size ratio"]
    assert (line.status, line.fix.partition(",")[0]) == (WARNING, "a smaller draft")


def test_weights_are_counted_as_they_are_loaded():
    """Against transformers: the files hold numbers of 2 bytes, the server computes in 4."""
    found = memory.weights_of(str(DEMO / "target"), load_model(DEMO / "target").dtype)
    assert found is not None
    numbers = sum(p.numel() for p in load_model(DEMO / "target").parameters())
    assert (found.count, found.num_bytes) == (numbers, 4 * numbers)


def test_memory(good: dict[str, Finding], monkeypatch: pytest.MonkeyPatch):
    # 16 and 2 layers, keys and values, heads of 32, 4 bytes: 16 x 2 x 4 x 32 x 4.
    assert "weights 10.4 MiB + 642.2 KiB; KV 16.0 KiB + 2.0 KiB per token" in good["memory"].found
    assert "72.0 MiB for a context of 4,096" in good["memory"].found
    short = check(max_total_tokens=1000)["memory"]
    assert (short.status, "1,000 tokens of KV" in short.found) == (WARNING, True)
    monkeypatch.setattr(memory, "device_bytes", lambda _: 2**20)
    line = check()["memory"]
    assert (line.status, "about 0 tokens" in line.found) == (FAILS, True)


def test_question(good: dict[str, Finding]):
    assert good["question"].found == (
        "partial 12, complete 13 tokens; verdict tokens 'yes' (309) and 'no' (271)"
    )
    line = check(parse_question="llama3")["question"]
    assert (line.status, "tokens" in line.found) == (FAILS, True)
    exact = check(parse_verification="token", parse_question=None)["question"]
    assert exact.found == "none with --parse-verification token"


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
    (line,) = start.findings(flags(parse_threshold=tmp_path / "no.json"))
    assert (line.check, line.status, "no.json" in line.found) == ("flags", FAILS, True)


def test_exit_code_and_table(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["doctor", *flags(parse_question="/no/such/file")]) == 1
    printed = capsys.readouterr().out
    assert "fails" in printed
    assert "Fix: give --parse-question an existing JSON" in " ".join(printed.split())


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


def test_another_version_serves():
    line = served.run_check("server", lambda: served.version({"version": "0.0.1"}))
    assert (line.status, "SGLang 0.0.1" in line.found) == (WARNING, True)


def test_a_small_pool():
    info = {"max_total_num_tokens": 100, "max_req_input_len": 4000}
    assert served.run_check("KV pool", lambda: served.pool(info)).status == WARNING


def answered(**parse: Any) -> served._Served:
    """A server that has answered one prompt with these values in meta_info."""
    from sglang_parse.client.records import Answer, BenchRun, Variant

    counters = {"mode": "parse", "rounds": 1, "skipped_drafts": 0, "drafted_tokens": 10}
    stages = {"draft_ms": 100.0, "verify_ms": 50.0, "accepted_tokens": 8, "matched_tokens": 0}
    record = {"verdicts": [0.9, 0.2], "verdict_mass": [0.99, 0.97], "threshold": 0.5}
    meta = counters | stages | {"trace": [record]} | parse
    found = served._Served(None, None, {})  # type: ignore[arg-type]
    legs = [
        BenchRun(Variant("x"), -1, 1, 1.0, (Answer(0, "", 10, ms, {"parse": [meta]}),))
        for ms in (200.0, 500.0)
    ]
    found.with_parse, found.plain = legs  # type: ignore[misc]
    return found


def statuses(**parse: Any) -> dict[str, tuple[str, str]]:
    lines = answered(**parse).findings()
    return {line.check: (line.status, line.found) for line in lines}


def test_good_answers():
    found = statuses()
    assert {status for status, _ in found.values()} == {OK}
    assert found["verdict mass"][1].startswith("mean 0.980, smallest 0.970 of the probability")
    assert found["acceptance"][1].startswith(
        "80% of draft tokens accepted, 80% of the output; verdicts"
    )
    # Plain takes 50 ms a token: r = 10 / 50, v = 5 / 50, a = 0.8; PARSE takes 20.
    assert found["speedup"][1].startswith("2.50x over plain decoding")
    assert "at most 2.00x = 1 / (r 0.20 + v 0.10 + 1 - a 0.80)" in found["speedup"][1]
    assert "Largest cost: drafting (0.20; a smaller" in found["speedup"][1]


def test_bad_answers():
    low = {"verdicts": [0.9], "verdict_mass": [0.1], "threshold": 0.5}
    assert statuses(trace=[low])["verdict mass"][0] == WARNING
    assert statuses(accepted_tokens=1)["acceptance"][0] == WARNING
    assert statuses(mode="plain", reason="LoRA")["answers"][0] == WARNING
    assert statuses(simulated=0.5)["answers"][0] == WARNING
    suspended = statuses(rounds=0, skipped_drafts=3, trace=[])
    assert suspended["answers"][0] == WARNING
    assert {suspended[name][0] for name in served.DRAFT_CHECKS} == {NOT_CHECKED}


def test_slower_than_plain():
    slow = answered()
    slow.with_parse, slow.plain = slow.plain, slow.with_parse  # type: ignore[misc]
    line = served.run_check("speedup", slow.speedup)
    assert (line.status, line.fix) == (WARNING, "a smaller or faster draft model")
