# `make help` says what there is. Needs python3 (3.11 or newer) with venv, and nothing else installed.

VERSIONS ?= locked
ifeq ($(filter locked newest lowest,$(VERSIONS)),)
$(error VERSIONS is "$(VERSIONS)"; it can be locked, newest or lowest)
endif

# The lowest versions are stated for the oldest Python.
PYTHON ?= $(if $(filter lowest,$(VERSIONS)),$(shell command -v python3.11 || echo python3),python3)
# Each choice of versions has an environment of its own: to switch back and forth installs nothing.
VENV   := .venv$(if $(filter locked,$(VERSIONS)),,-$(VERSIONS))
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

LOCK := requirements-dev.txt
# The part of it that the demo needs, so that nobody waits for the test tools' 2 GB to see the demo.
DEMO_LOCK := requirements-demo.txt
# Python compiles what is imported, the first time: a small part of what is installed.
# PySpark comes as source: the wheel that is made of its 450 MB and unpacked at once need not be compressed.
UNCOMPRESSED := --config-settings=--build-option=--compression=stored
PIP_INSTALL := $(BIN)/python -m pip install -qq --no-compile $(UNCOMPRESSED)
# uv takes half the time of pip. It reads nothing of pip's configuration, so it gets the index that pip would take:
# that of the environment, of [install], or of [global].
PIP_INDEX = $${PIP_INDEX_URL:-$$($(BIN)/python -m pip config list 2>/dev/null | \
	sed -nE 's/^(global|install)[.]index-url=.(.*).$$/\2/p' | tail -n 1)}
UV = sed -n '/^uv==/,/[^\]$$/p' $(DEMO_LOCK) | $(PIP_INSTALL) --require-hashes -r /dev/stdin && \
	UV_DEFAULT_INDEX="$(PIP_INDEX)" $(BIN)/uv
UV_INSTALL = $(UV) pip install --quiet --python $(BIN)/python $(UNCOMPRESSED)
# Where there is no uv, or it cannot reach what pip can, pip installs.
install = { $(UV_INSTALL) $(1) || $(PIP_INSTALL) $(1); }
# With the versions of a lock, checked against its hashes, which also has what builds the editable installation.
install_locked = $(call install,--require-hashes -r $(1)) && \
	$(call install,--no-deps --no-build-isolation --editable .)
ALL := '.[docs,test]'
# Without the extra `test`: moto and others in it need newer versions than the lowest. Only uv can choose these.
CORE := '.[aws,azure,contract,dbt,fsspec,gcp,pkcs11,scan,vault]'
CORE_TOOLS := hypothesis opentelemetry-sdk pandas pytest pytest-timeout pytest-xdist
install_lowest = $(UV_INSTALL) --resolution lowest-direct --editable $(CORE) && $(UV_INSTALL) $(CORE_TOOLS)

# How many tests were skipped, and why: the last line, after the linters' output.
SKIPPED := $(VENV)/skipped.txt

# Without rules, for a second make beside the tests could install again.
CHECKS := $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy --platform linux
OTHER_SYSTEMS := $(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin src && $(BIN)/mypy --platform win32 --cache-dir .mypy_cache/win32 src

.DEFAULT_GOAL := help
.PHONY: help demo test programs coverage check soak mutants mutation docs lock vectors bench clean

help: ## Say what there is
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(DEMO_INSTALLED) ## Encrypt 336,776 flights and read them back; files go to ./demo, or FOLDER=...
	@$(BIN)/parquet-keytools demo --folder "$(FOLDER)"

test: $(TEST_INSTALLED) programs ## All tests, linters, types on Linux; SPARK=no leaves Spark out, VERSIONS=newest or lowest the lock
	@if [ -n "$$PARQUET_TEST_DATA" ]; then echo "Test data: $$PARQUET_TEST_DATA"; \
	else echo "PARQUET_TEST_DATA is not set: tests on the public Parquet files are skipped."; fi
ifeq ($(VERSIONS),lowest)
	@$(BIN)/python -m pytest --core --skipped-to=$(SKIPPED) $(PYTEST_ARGUMENTS); STATUS=$$?; cat $(SKIPPED); exit $$STATUS
else
	@# Linters and types are checked in the time that tests wait. In a new clone, one process compiles what all of them
	@# import, and another one makes an archive of Spark's classes, with which a JVM takes two thirds of the time.
	@nice sh -xc '$(CHECKS)' >$(VENV)/check.log 2>&1 & CHECK=$$!; \
	$(BIN)/python tests/services/spark_jvm.py >/dev/null 2>&1 & ARCHIVE=$$!; \
	ls tests/__pycache__/conftest.*-pytest-*.pyc >/dev/null 2>&1 || $(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1; \
	wait $$ARCHIVE; \
	$(BIN)/python -m pytest --skipped-to=$(SKIPPED) $(PYTEST_ARGUMENTS); STATUS=$$?; \
	wait $$CHECK || STATUS=1; cat $(VENV)/check.log $(SKIPPED); exit $$STATUS
endif

# Spark needs Java, the tests of PKCS#11 a token in software, and the report a browser that opens it. Where Java cannot be
# installed here, the tests stop and say what to install; without the others, their tests are skipped with a reason.
programs:
	@[ $(VERSIONS) != lowest ] || exit 0; \
	PACKAGES="$$([ "$(SPARK)" = no ] || command -v java >/dev/null || echo openjdk-17-jre-headless) \
		$$(command -v softhsm2-util >/dev/null || echo softhsm2) $$(command -v chromium >/dev/null || echo chromium)"; \
	if [ -n "$$(echo $$PACKAGES)" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "Installing $$(echo $$PACKAGES) ..."; \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends $$PACKAGES >/dev/null || true; \
	fi

# They count Python's objects and bytes, to which the probes of coverage add their own.
MEASURES_OBJECTS := tests/unit/view/test_plain_file.py::test_the_cache_is_bounded \
	tests/unit/format/test_thrift.py::test_what_no_key_authenticates_takes_little_memory

coverage: $(TEST_INSTALLED) programs ## Lines and branches that the tests reach; fails below 92 %
	$(BIN)/python -m slipcover --branch --source $(CURDIR)/src/parquet_keytools --omit '*/kms/contract_tests.py' --json --out .coverage.json \
		-m pytest $(PYTEST_ARGUMENTS) $(addprefix --deselect=,$(MEASURES_OBJECTS))
	@$(BIN)/python -m slipcover --skip-covered --fail-under 92 --out .coverage.json --merge .coverage.json

check: $(TEST_INSTALLED) ## Linters, and types on Linux, macOS and Windows
	$(CHECKS) && $(OTHER_SYSTEMS)

docs: $(TEST_INSTALLED) ## The documentation site, into ./site; broken links and missing pages are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# What builds an editable installation is pinned, too, and uv. No index is named: the files work with any of them.
COMPILE = printf 'editables\nhatchling\nuv\n' | $(BIN)/uv --no-config pip compile pyproject.toml - --upgrade --quiet \
	--universal --python-version 3.11 --generate-hashes --no-annotate --custom-compile-command 'make lock'

lock: | $(BIN)/python ## Update the locks: the newest versions that pyproject.toml allows, with hashes
	@$(PIP_INSTALL) --upgrade 'uv>=0.9'
	@$(COMPILE) --extra test --extra docs -o $(LOCK)
	@$(COMPILE) --extra demo -c $(LOCK) -o $(DEMO_LOCK)

vectors: $(TEST_INSTALLED) ## Write the vector kit for other engines' maintainers to ./vectors, or VECTORS=...
	@PYTHONPATH=tests $(BIN)/python -m vector_kit.write_kit "$(VECTORS)"

soak: mutants mutation ## Hours: all mutants, crash points and races in place of samples, and mutation testing
	SOAK=yes $(BIN)/python -m pytest --timeout=7200 tests/tamper/test_rotation_crashes.py \
		tests/tamper/test_write_crashes.py tests/tamper/test_erase_crashes.py tests/tamper/test_two_users.py \
		tests/tamper/test_rotation_concurrency.py tests/tamper/test_iceberg_crashes.py \
		tests/tamper/test_iceberg_users.py tests/services/test_s3_rotation.py tests/interop/test_view_matrix.py \
		tests/interop/test_rotated_files.py tests/interop/test_spark_files.py tests/services/test_rotation_attacks.py \
		tests/interop/test_pyarrow_crypto_factory.py \
		tests/services/test_aws_kms.py tests/services/test_azure_kms.py tests/services/test_several_kmss.py \
		tests/services/test_pkcs11_kms.py tests/services/test_vault_kms.py tests/services/test_vault_faults.py \
		tests/services/test_gcp_kms.py tests/services/test_keys_in_use.py \
		tests/unit/cli \
		tests/vectors/test_public_views.py tests/vectors/test_round_trip.py tests/vectors/test_page_ordinals.py \
		tests/vectors/test_footers_kept.py \
		tests/unit/iceberg tests/unit/serve \
		tests/services/test_spark_pipelines.py tests/tamper/test_footer_memory.py \
		tests/tamper/test_negative_numbers.py tests/unit/encryption tests/unit/kms/test_keystore.py tests/unit/config tests/unit/keys \
		tests/unit/spark/test_frames.py tests/unit/test_strict_base64.py tests/packaging/test_examples.py \
		tests/tamper/test_process_ends.py tests/tamper/test_moves_to_tenant_keys.py tests/tamper/test_walk_matrix.py tests/tamper/test_foreign_files.py tests/tamper/test_hostile_iceberg.py tests/unit/tables \
		tests/unit/format/test_other_types.py tests/unit/rotation/test_rekeying_in_processes.py \
		tests/unit/rotation/test_rotate.py tests/unit/test_canary.py \
		tests/unit/view/test_arrivals.py tests/unit/view/test_fsspec_suite.py

mutants: $(TEST_INSTALLED) ## 100,000 mutants of files through inspect, verify, decrypt; 200,000 of keys through rotate; generated bytes
	SOAK=yes $(BIN)/python -m pytest --timeout=7200 tests/fuzz

mutation: $(TEST_INSTALLED) ## Mutation testing of what [tool.mutmut] names, or of one file: MUTATED='parquet_keytools.keys.key_wrapping.*'
	@$(PIP_INSTALL) 'mutmut==3.8.*'
	$(BIN)/mutmut run $(if $(MUTATED),'$(MUTATED)')
	$(BIN)/mutmut results

bench: $(TEST_INSTALLED) ## Benchmarks on small data
	$(BIN)/python benchmarks/arrow_overhead.py --megabytes 50 --rounds 3

clean: ## Remove what was made here: virtual environment, caches, the demo's files
	rm -rf .venv .venv-lowest .venv-newest .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage.json build dist demo mutants site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One after the other: both install into the same virtual environment.
$(DEMO_INSTALLED): pyproject.toml $(DEMO_LOCK) | $(BIN)/python
	@echo "Installing parquet-keytools and what the demo needs into $(VENV) ..."
	@$(if $(filter locked,$(VERSIONS)),$(call install_locked,$(DEMO_LOCK)),$(call install,--editable '.[demo]'))
	@touch $@

$(TEST_INSTALLED): pyproject.toml $(LOCK) | $(BIN)/python
	@echo "Installing parquet-keytools and what the tests need into $(VENV): $(VERSIONS) versions ..."
	@$(if $(filter lowest,$(VERSIONS)),$(install_lowest),$(if $(filter newest,$(VERSIONS)),\
		$(call install,--upgrade --editable $(ALL)),$(call install_locked,$(LOCK))))
	@touch $@ $(DEMO_INSTALLED)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("python3 is %d.%d; 3.11 or newer is needed" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "On Debian: apt install python3-venv" >&2; exit 1; }
