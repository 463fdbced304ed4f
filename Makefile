# `make help` lists the targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PROFILE ?= reference
ARGS ?=
export HF_HUB_OFFLINE ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup main-run test test-slow test-gpu lint verify-assets clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | awk -F'\t' '{printf "  make %-16s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(STAMP)  ## make .venv and install everything with the tested pins

main-run: $(STAMP)  ## Specter and the baselines on the shipped models: table, plot, CSV (PROFILE=paper: the paper's run)
	$(BIN)/python run.py profile=$(PROFILE) $(ARGS)

test: lint  ## lint, types and the test suite (what CI runs)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu and not network"

test-slow: $(STAMP)  ## the tests that take minutes or need gptqmodel
	$(BIN)/python -m pytest -m slow

test-gpu: $(STAMP)  ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

lint: $(STAMP)  ## ruff, mypy, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

verify-assets: $(STAMP)  ## check every shipped file against reference/SHA256SUMS
	cd reference && sha256sum --quiet -c SHA256SUMS

clean:  ## remove outputs and caches (not .venv, not downloads)
	rm -rf outputs .mypy_cache .ruff_cache .pytest_cache .hypothesis

-include makefiles/*.mk
