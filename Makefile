# `make help` says what there is. Needs python3 (3.11 or newer) with venv, and nothing else installed.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
FOLDER ?= demo
VECTORS ?= vectors
# In the groups and the order of tests/order.py. Four at a time keep two cores busy: a third of the time is waiting.
PYTEST_ARGUMENTS ?= --numprocesses=4 --dist=loadfile --no-loadscope-reorder

# A slow package index is waited for.
export PIP_DEFAULT_TIMEOUT ?= 120
export PIP_RETRIES         ?= 10
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export UV_HTTP_TIMEOUT     ?= $(PIP_DEFAULT_TIMEOUT)
export UV_HTTP_RETRIES     ?= $(PIP_RETRIES)
# Set on some machines: each of hundreds of processes would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

ifndef PARQUET_TEST_DATA
ifneq ($(wildcard ../shared/parquet-testing/data),)
export PARQUET_TEST_DATA := $(abspath ../shared/parquet-testing/data)
endif
endif

DEMO_INSTALLED := $(VENV)/.installed-demo
TEST_INSTALLED := $(VENV)/.installed-test
DOCS_INSTALLED := $(VENV)/.installed-docs

LOCK := requirements-dev.txt
# Python compiles what is imported, the first time: a small part of what is installed.
# PySpark comes as source: the wheel that is made of its 450 MB and unpacked at once need not be compressed.
UNCOMPRESSED := --config-settings=--build-option=--compression=stored
PIP_INSTALL := $(BIN)/python -m pip install -qq --no-compile $(UNCOMPRESSED)
# uv takes half the time of pip. It reads nothing of pip's configuration, so it gets the index that pip would take:
# that of the environment, of [install], or of [global].
PIP_INDEX = $${PIP_INDEX_URL:-$$($(BIN)/python -m pip config list 2>/dev/null | \
	sed -nE 's/^(global|install)[.]index-url=.(.*).$$/\2/p' | tail -n 1)}
UV_INSTALL = $(PIP_INSTALL) 'uv>=0.9' && UV_DEFAULT_INDEX="$(PIP_INDEX)" \
	$(BIN)/uv pip install --quiet --python $(BIN)/python $(UNCOMPRESSED)
ifeq ($(LOCKED),yes)
# The versions of the lock, checked against its hashes; it has all extras.
install = $(PIP_INSTALL) --require-hashes -r $(LOCK) && $(PIP_INSTALL) --no-deps --no-build-isolation --editable .
else
# Where there is no uv, or it cannot reach what pip can, pip installs.
install = { $(UV_INSTALL) --editable '.[$(1)]' || $(PIP_INSTALL) --editable '.[$(1)]'; }
endif

# Without rules, for a second make beside the tests could install again.
CHECKS := $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy --platform linux && $(BIN)/mypy --platform darwin && $(BIN)/mypy --platform win32

.DEFAULT_GOAL := help
.PHONY: help demo test java check soak mutants mutation docs lock vectors bench clean

help: ## Say what there is
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(DEMO_INSTALLED) ## Encrypt 336,776 flights and read them back; files go to ./demo, or FOLDER=...
	@$(BIN)/parquet-keytools demo --folder "$(FOLDER)"

test: $(TEST_INSTALLED) java ## Linters, types, and all tests with their coverage; SPARK=no leaves those with Spark out
	@if [ -n "$$PARQUET_TEST_DATA" ]; then echo "Test data: $$PARQUET_TEST_DATA"; \
	else echo "PARQUET_TEST_DATA is not set: tests on the public Parquet files are skipped."; fi
	@# An archive of Spark's classes comes meanwhile: the JVMs that start after that start faster.
	@# Linters and types are checked in the time that tests wait. One process compiles what all of them import.
	@nice sh -xc '$(CHECKS)' >$(VENV)/check.log 2>&1 & CHECK=$$!; \
	$(BIN)/python tests/services/spark_jvm.py >/dev/null 2>&1 & \
	$(BIN)/python -m pytest --coverage --collect-only -qq >/dev/null 2>&1; \
	$(BIN)/python -m pytest --coverage $(PYTEST_ARGUMENTS); STATUS=$$?; \
	wait $$CHECK || STATUS=1; cat $(VENV)/check.log; exit $$STATUS

# Spark needs it. Where it cannot be installed here, the tests stop and say what to install.
java:
	@[ "$(SPARK)" = no ] || command -v java >/dev/null || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "Installing openjdk-17-jre-headless ..."; \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends openjdk-17-jre-headless >/dev/null || true; \
	fi

check: $(TEST_INSTALLED) ## Linters and types; LOCKED=yes, here and elsewhere, installs the versions of the lock
	$(CHECKS)

docs: $(DOCS_INSTALLED) ## The documentation site, into ./site; broken links and missing pages are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lock: | $(BIN)/python ## Update requirements-dev.txt: the newest versions that pyproject.toml allows, with hashes
	@$(PIP_INSTALL) 'uv>=0.9'
	@# What builds an editable installation is pinned, too. No index is named: the file works with any of them.
	@echo editables | $(BIN)/uv --no-config pip compile pyproject.toml - --extra test --extra docs --upgrade --quiet \
		--universal --python-version 3.11 --generate-hashes --no-annotate --custom-compile-command 'make lock' -o $(LOCK)

vectors: $(TEST_INSTALLED) ## Write the vector kit for other engines' maintainers to ./vectors, or VECTORS=...
	@PYTHONPATH=tests $(BIN)/python -m vector_kit.write_kit "$(VECTORS)"

soak: mutants mutation ## Hours: all mutants, crash points and races in place of samples, and mutation testing
	SOAK=yes $(BIN)/python -m pytest --timeout=7200 tests/tamper/test_rotation_crashes.py \
		tests/tamper/test_write_crashes.py tests/tamper/test_two_users.py \
		tests/tamper/test_rotation_concurrency.py tests/tamper/test_iceberg_crashes.py \
		tests/tamper/test_iceberg_users.py tests/services/test_s3_rotation.py tests/interop/test_view_matrix.py \
		tests/vectors/test_public_views.py tests/vectors/test_round_trip.py tests/vectors/test_page_ordinals.py \
		tests/unit/iceberg tests/unit/serve \
		tests/services/test_spark_pipelines.py tests/tamper/test_footer_memory.py \
		tests/tamper/test_negative_numbers.py tests/unit/encryption tests/unit/kms/test_keystore.py tests/unit/config tests/unit/keys \
		tests/unit/spark/test_frames.py tests/unit/test_strict_base64.py tests/packaging/test_examples.py \
		tests/tamper/test_process_ends.py

mutants: $(TEST_INSTALLED) ## 100,000 mutants of files through inspect, verify, decrypt; 200,000 of keys through rotate; generated bytes
	SOAK=yes $(BIN)/python -m pytest --timeout=7200 tests/fuzz

mutation: $(TEST_INSTALLED) ## Mutation testing of what [tool.mutmut] names, or of one file: MUTATED='parquet_keytools.keys.kek.*'
	@$(PIP_INSTALL) 'mutmut==3.8.*'
	$(BIN)/mutmut run $(if $(MUTATED),'$(MUTATED)')
	$(BIN)/mutmut results

bench: $(TEST_INSTALLED) ## Benchmarks on small data
	$(BIN)/python benchmarks/arrow_overhead.py --megabytes 50 --rounds 3

clean: ## Remove what was made here: virtual environment, caches, the demo's files
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage.txt build dist demo mutants site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One after the other: all install into the same virtual environment.
$(DEMO_INSTALLED): pyproject.toml | $(BIN)/python
	@echo "Installing parquet-keytools and what the demo needs into $(VENV) ..."
	@$(call install,demo)
	@touch $@

$(TEST_INSTALLED): pyproject.toml | $(BIN)/python
	@echo "Installing parquet-keytools and what the tests need into $(VENV) ..."
	@$(call install,test)
	@touch $@ $(DEMO_INSTALLED)

$(DOCS_INSTALLED): pyproject.toml | $(BIN)/python
	@echo "Installing parquet-keytools and what the documentation site needs into $(VENV) ..."
	@$(call install,docs)
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("python3 is %d.%d; 3.11 or newer is needed" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "On Debian: apt install python3-venv" >&2; exit 1; }
