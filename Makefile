# make demo      train a small GPT with one jitted train step, and look at its traces (under 3 minutes)
# make test      everything that CI runs: style, types, layers, tests (under 20 minutes)
# make docs      the documentation site in build/site, its examples and tutorials run
# make thorough  the laws with many more random traces; make bench: the benchmarks; make golden: rewrite the golden traces
#
# Needs Python 3.11 or newer and nothing else. PYTHON=... picks one, VENV=... the folder that everything is installed into.

VENV ?= .venv
JOBS ?= auto
bin := $(VENV)/bin
is_new := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c '$(is_new)' >/dev/null 2>&1 && echo $$p && break; done)

.PHONY: help demo test docs thorough bench golden clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# //p' Makefile | head -5

# Threads that wait passively lose little on an idle machine and save a busy one from crawling.
demo: export OMP_WAIT_POLICY ?= passive
demo: $(VENV)/.demo
	@$(bin)/python -m thunder_fn demo

test: $(VENV)/.test
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/pyright --pythonpath $(bin)/python
	$(bin)/lint-imports --no-logo
	$(bin)/python -m pytest -n $(JOBS)

docs: export NO_MKDOCS_2_WARNING ?= 1
docs: $(VENV)/.docs
	$(bin)/python -m mkdocs build --strict

thorough: $(VENV)/.test
	HYPOTHESIS_PROFILE=thorough $(bin)/python -m pytest -n $(JOBS) tests/laws

bench: $(VENV)/.demo
	@$(bin)/python -m thunder_fn benchmarks

golden: $(VENV)/.test
	$(bin)/python -m pytest -q tests/golden tests/meta --update-golden

clean:
	rm -rf $(VENV) build demo_out benchmark_out

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
$(VENV)/.demo $(VENV)/.docs $(VENV)/.test: $(VENV)/.%: $(VENV)/.python pyproject.toml constraints.txt
	@echo "installing thunder_fn[$*] into $(VENV)"
	@$(bin)/python -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@
