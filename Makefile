# `make demo` and `make test` work from a clean clone: `env` is made first, and again when its inputs change.
#
#   PYTHON      the interpreter .venv is made from (3.11 or newer)
#   PIP_FLAGS   extra flags for pip, for example an index that has torch without CUDA
#   PYTEST_ARGS extra arguments for pytest, for example "-x tests/test_architecture.py"
#   DEMO_ARGS   extra arguments for the demo, for example "--plant kv-transposed-twice"

PYTHON ?= python3
PIP_FLAGS ?=
PYTEST_ARGS ?=
DEMO_ARGS ?=

BIN := .venv/bin
STAMP := .venv/installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt $(PIP_FLAGS)

.DEFAULT_GOAL := help
.PHONY: help env demo test test-gpu lint pytest clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /|/' | awk -F'|' '{ printf "  make %-10s %s\n", $$1, $$2 }'

env: $(STAMP) ## make .venv with everything pinned in constraints.txt

demo: $(STAMP) ## train a small real Flux in one process and under context parallelism, and compare the gradients
	$(BIN)/ringtrue demo $(DEMO_ARGS)

test: lint pytest ## lint, types and the whole CPU test suite

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

pytest: $(STAMP) ## the CPU test suite alone
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-gpu: $(STAMP) ## the tests that need one or more CUDA devices
	$(BIN)/python -m pytest -m "gpu or multi_gpu" $(PYTEST_ARGS)

clean: ## remove .venv and every cache
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "ringtrue needs Python 3.11 or newer: make PYTHON=python3.x"; exit 1; }
	@echo "making .venv (a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) $$(grep '^torch==' constraints.txt) hatchling editables
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@
