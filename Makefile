# `make demo` and `make test` each work as the only command on a machine that has Python >= 3.11 with venv, and make.
#
# PYTHON=python3.12       the interpreter to use
# ARGS="-k publisher"     passed on to pytest, the demo or the benchmark
# SEEDS=100000            worlds that `make simulate` plays
# SECONDS=60 SEED=7       how long `make soak` takes over all backends, and what happens then
# EXAMPLES=1000           cases that each property is tried on
# WORKERS=4               processes that share the tests, each with servers of its own; 0 runs them in this one

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help environment demo test test-vllm coverage lint check wheel simulate soak bench bench-backends bench-relay clean

WORKERS ?= 2
SEEDS ?= 10000
SECONDS ?= 600
SEED ?=

export PYTHON
# The repository root must never be a place to import from: it has a folder called `codecs`.
unexport PYTHONPATH
# Compiled loops outlive a renewed link tree; a change in any of them compiles all again, since numba does not see that
# one loop calls another that changed.
export NUMBA_CACHE_DIR := $(CURDIR)/.cache/numba/$(firstword $(shell cat codecs/kernels/*.py | cksum))

help: ## say what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

environment: ## create or renew .venv; the others do so by themselves
	@scripts/environment

demo: environment ## train a real model, follow it, kill things, compare every bit
	@.venv/bin/deltabus demo $(ARGS)

test: environment ## run all tests
	@.venv/bin/pytest --numprocesses $(WORKERS) --dist loadfile $(ARGS)

test-vllm: ## run the tests against real vLLM servers on the CPU, in an environment of their own; 1.8 GB, 7 minutes
	@scripts/test-vllm $(ARGS)

coverage: environment ## run all tests and show which lines they reach; takes half as long again
	@.venv/bin/pytest --cov --cov-report=term $(ARGS)

lint: environment ## style, format and types
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@cd tests && ../.venv/bin/mypy --config-file ../pyproject.toml -p deltabus

check: lint test wheel ## lint, all tests, and the built wheel without the sources; CI runs this, and then test-vllm

wheel: environment ## build the wheel into dist/ and test it without the sources
	@scripts/check-wheel

simulate: environment ## play thousands of worlds on a virtual clock: crashes, lost answers, zombies, retention
	@cd tests && ../.venv/bin/python -m simulation --seeds $(SEEDS) $(ARGS)

soak: environment ## let real processes and servers live through faults for ten minutes, and compare every bit
	@DELTABUS_SOAK_SECONDS=$(SECONDS) DELTABUS_SOAK_SEED=$(SEED) .venv/bin/pytest tests/soak -q -s $(ARGS)

bench: environment ## measure bytes, speed and memory, as ratios in one run
	@.venv/bin/python benchmarks/wire.py $(ARGS)

bench-backends: environment ## measure each backend against its real server on this machine
	@.venv/bin/python benchmarks/backends.py $(ARGS)

bench-relay: environment ## measure a relay with many readers and followers on this machine
	@.venv/bin/python benchmarks/relay.py $(ARGS)

clean: ## remove what was built, the environment included
	@rm -rf .venv .venv-vllm .cache build dist *.egg-info .coverage* htmlcov
