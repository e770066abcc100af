# `make demo` and `make test` each work as the only command on a machine that has Python >= 3.11 with venv, and make.
#
# PYTHON=python3.12       the interpreter to use
# ARGS="-k publisher"     passed on to pytest, the demo or the benchmark

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help environment demo test coverage lint check wheel bench clean

export PYTHON
# The repository root must never be a place to import from: it has a folder called `codecs`.
unexport PYTHONPATH
# Compiled loops outlive a renewed link tree; a change in any of them compiles all again, since numba does not see that
# one loop calls another that changed.
export NUMBA_CACHE_DIR := $(CURDIR)/.cache/numba/$(firstword $(shell cat codecs/kernels/*.py | cksum))

help: ## say what there is to make
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

environment: ## create or renew .venv; the others do so by themselves
	@scripts/environment

demo: environment ## train a real model, follow it, kill things, compare every bit
	@.venv/bin/deltabus demo $(ARGS)

test: environment ## run all tests
	@.venv/bin/pytest $(ARGS)

coverage: environment ## run all tests and show which lines they reach; takes half as long again
	@.venv/bin/pytest --cov --cov-report=term $(ARGS)

lint: environment ## style, format and types
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@cd tests && ../.venv/bin/mypy --config-file ../pyproject.toml -p deltabus

check: lint test wheel ## what CI runs: lint, all tests, and the built wheel without the sources

wheel: environment ## build the wheel into dist/ and test it without the sources
	@scripts/check-wheel

bench: environment ## measure bytes and speed, as ratios in one run
	@.venv/bin/python benchmarks/wire.py $(ARGS)

clean: ## remove what was built, the environment included
	@rm -rf .venv .cache build dist *.egg-info .coverage* htmlcov
