# `make help` says what there is. Needs python3 (3.11 or newer) with venv, and nothing else installed.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
FOLDER ?= demo
VECTORS ?= vectors
# Two at a time, each file of tests in one process: much of their time is waiting. In the order of folders, so that the
# long ones come before the many short ones, and no core is idle at the end.
PYTEST_ARGUMENTS ?= --numprocesses=2 --dist=loadfile --no-loadscope-reorder

# A slow package index is waited for.
export PIP_DEFAULT_TIMEOUT ?= 120
export PIP_RETRIES         ?= 10
export PIP_DISABLE_PIP_VERSION_CHECK := 1

ifndef PARQUET_TEST_DATA
ifneq ($(wildcard ../shared/parquet-testing/data),)
export PARQUET_TEST_DATA := $(abspath ../shared/parquet-testing/data)
endif
endif

DEMO_INSTALLED := $(VENV)/.installed-demo
TEST_INSTALLED := $(VENV)/.installed-test

.DEFAULT_GOAL := help
.PHONY: help demo test java check vectors mutants bench clean

help: ## Say what there is
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(DEMO_INSTALLED) ## Encrypt 336,776 flights and read them back; files go to ./demo, or FOLDER=...
	@$(BIN)/parquet-keytools demo --folder "$(FOLDER)"

test: check java ## Linters, types, and all tests; SPARK=no leaves those with Spark out
	@if [ -n "$$PARQUET_TEST_DATA" ]; then echo "Test data: $$PARQUET_TEST_DATA"; \
	else echo "PARQUET_TEST_DATA is not set: tests on the public Parquet files are skipped."; fi
	$(BIN)/python -m pytest $(PYTEST_ARGUMENTS)

# Spark needs it. Where it cannot be installed here, the tests stop and say what to install.
java:
	@[ "$(SPARK)" = no ] || command -v java >/dev/null || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "Installing openjdk-17-jre-headless ..."; \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends openjdk-17-jre-headless >/dev/null || true; \
	fi

check: $(TEST_INSTALLED) ## Linters and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

vectors: $(TEST_INSTALLED) ## Write the vector kit for other engines' maintainers to ./vectors, or VECTORS=...
	@PYTHONPATH=tests $(BIN)/python -m vector_kit.write_kit "$(VECTORS)"

mutants: $(TEST_INSTALLED) ## 100,000 mutants of valid files through inspect, verify and decrypt
	MUTANTS=$${MUTANTS:-100000} $(BIN)/python -m pytest tests/fuzz/test_mutants.py

bench: $(TEST_INSTALLED) ## Benchmarks on small data
	$(BIN)/python benchmarks/arrow_overhead.py --megabytes 50 --rounds 3

clean: ## Remove what was made here: virtual environment, caches, the demo's files
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One after the other: both install into the same virtual environment.
$(DEMO_INSTALLED): pyproject.toml | $(BIN)/python
	@echo "Installing parquet-keytools and what the demo needs into $(VENV) ..."
	@$(BIN)/python -m pip install -qq --editable '.[demo]'
	@touch $@

$(TEST_INSTALLED): pyproject.toml | $(BIN)/python
	@echo "Installing parquet-keytools and what the tests need into $(VENV) ..."
	@$(BIN)/python -m pip install -qq --editable '.[test]'
	@touch $@ $(DEMO_INSTALLED)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("python3 is %d.%d; 3.11 or newer is needed" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "On Debian: apt install python3-venv" >&2; exit 1; }
