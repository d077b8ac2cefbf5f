# make demo      train a small GPT with one jitted train step, and look at its traces (under 3 minutes)
# make test      everything that CI runs: style, types, layers, tests (15 to 25 minutes on 2 cores)
# make docs      the documentation site in build/site, its examples and tutorials run
# make test-gpu  tests/gpu on a simulated GPU (Linux, x86-64; downloads the CUDA build of PyTorch, about 5 GB); ALL=1: all members
# make thorough  all tests of large families, the laws with many more random traces, hours of the fuzzer, models of others
#                make bench: the benchmarks
# make spoiled   laws and models with memory that is filled with NaN before it is written (THUNDER_FN_CHECK=1)
# make machines  what computes, as other processors and thread counts run it; make golden: rewrite the golden traces
#                make chart: the figures of benchmarks/results as docs/benchmarks.svg
#                make gallery: the programs of gallery/ and their pictures in docs/gallery
#
# Needs Python 3.11 or newer and nothing else. PYTHON=... picks one, VENV=... the folder that everything is installed into.

VENV ?= .venv
JOBS ?= auto
bin := $(VENV)/bin
is_new := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c '$(is_new)' >/dev/null 2>&1 && echo $$p && break; done)

VENV_GPU ?= .venv-gpu
NULLGPU := build/nullgpu/nullgpu
MACHINES ?=
FUZZ_SECONDS ?= 7200

# The suite starts hundreds of processes: without bytecode on disk each of them compiles PyTorch's Python and ours anew.
export PYTHONDONTWRITEBYTECODE :=

SPOILED := tests/executors/test_inductor_laws.py tests/executors/test_compiled_loops.py tests/unit/test_torch_executor.py \
	tests/unit/test_given_memory.py tests/unit/test_spoiling.py tests/laws/test_aliases.py tests/models/test_models.py \
	tests/models/test_others_on_inductor.py

.PHONY: help demo test test-gpu docs thorough machines spoiled bench chart gallery golden clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# //p' Makefile | head -8

# Threads that wait passively lose little on an idle machine and save a busy one from crawling.
demo: export OMP_WAIT_POLICY ?= passive
demo: $(VENV)/.demo
	@$(bin)/python -m thunder_fn demo

test: $(VENV)/.test
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/pyright --threads --pythonpath $(bin)/python
	$(bin)/lint-imports --no-logo
	$(bin)/python -m pytest -n $(JOBS) --quick

# On a real GPU: `python -m pytest tests/gpu`.
test-gpu: $(NULLGPU)
	OMP_NUM_THREADS=1 $(NULLGPU) $(VENV_GPU)/bin/python -m pytest -n $(JOBS) $(if $(ALL),,--quick) tests/gpu

$(NULLGPU): $(VENV_GPU)/.test-gpu $(wildcard tests/nullgpu/*.c tests/nullgpu/*.cpp tests/nullgpu/py/*.py) \
            tests/nullgpu/build.sh tests/nullgpu/nullgpu
	@OUT=build/nullgpu tests/nullgpu/build.sh $(VENV_GPU)/bin/python
	@touch $@

# What names another index of PyTorch's wheels, such as one without CUDA, is left out.
$(VENV_GPU)/.test-gpu: export PIP_CONFIG_FILE := /dev/null
$(VENV_GPU)/.test-gpu: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "thunder_fn needs Python 3.11 or newer, and no python3 on the PATH is."; exit 1; }
	@echo "installing the CUDA build of PyTorch into $(VENV_GPU)"
	@$(PYTHON) -m venv $(VENV_GPU)
	@env -u PIP_FIND_LINKS -u PIP_EXTRA_INDEX_URL -u PIP_CONSTRAINT $(VENV_GPU)/bin/python -m pip install -qq --no-compile \
	  --disable-pip-version-check -c constraints.txt -e '.[testing]' expecttest pytest pytest-xdist
	@touch $@

docs: export NO_MKDOCS_2_WARNING ?= 1
docs: $(VENV)/.docs
	$(bin)/python -m mkdocs build --strict

thorough: $(VENV)/.test $(VENV)/.others
	$(bin)/python -m pytest -n $(JOBS)
	HYPOTHESIS_PROFILE=thorough $(bin)/python -m pytest -n $(JOBS) tests/laws tests/unit/test_export.py tests/executors/test_ahead_of_time.py \
	  tests/distributed/test_elastic.py
	-$(bin)/python -m thunder_fn laws --mutants --file build/mutants.jsonl --seconds 7200
	-$(bin)/python -m thunder_fn laws --backend inductor --count 400
	$(bin)/python -m tests.ops.sweep
	$(bin)/python -m tests.fuzz --programs 1000000 --seconds $(FUZZ_SECONDS) --folder build/fuzz
	$(bin)/python -m tests.fuzz.states --programs 1000000 --seconds $(FUZZ_SECONDS)
	$(bin)/python -m pytest -n $(JOBS) tests/models/test_others_on_inductor.py -rs
	GALLERY=full $(bin)/python -m pytest -n $(JOBS) tests/gallery

machines: $(VENV)/.test
	$(bin)/python -m tests.machines $(MACHINES) -- -n $(JOBS)

# Memory is spoiled before it is written and after it is given away; every program runs three times.
spoiled: $(VENV)/.test
	THUNDER_FN_CHECK=1 $(bin)/python -m pytest -n $(JOBS) $(SPOILED)

bench: $(VENV)/.demo
	@$(bin)/python -m thunder_fn benchmarks

chart: $(VENV)/.demo
	@$(bin)/python -m thunder_fn benchmarks --chart docs/benchmarks.svg

gallery: $(VENV)/.demo
	$(bin)/python -m gallery

golden: $(VENV)/.test
	$(bin)/python -m pytest -q tests/golden tests/meta --update-golden

clean:
	rm -rf $(VENV) $(VENV_GPU) build demo_out benchmark_out

$(VENV)/.python:
	@test -n "$(PYTHON)" || { echo "thunder_fn needs Python 3.11 or newer, and no python3 on the PATH is." \
	  "Install one, or name it: make PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) -c '$(is_new)' || { echo "$(PYTHON) is older than Python 3.11: make PYTHON=/path/to/python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) comes without its venv module." \
	  "Install it (Debian, Ubuntu: apt install python3-venv)."; exit 1; }
	@echo "creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# An extra is installed again only when the pins or the package's own metadata change.
$(VENV)/.demo $(VENV)/.docs $(VENV)/.test $(VENV)/.others: $(VENV)/.%: $(VENV)/.python pyproject.toml constraints.txt
	@echo "installing thunder_fn[$*] into $(VENV)"
	@$(bin)/python -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@
