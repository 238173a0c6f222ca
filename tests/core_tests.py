"""`--core`: the tests that the core's own dependencies are enough for, at the lowest versions that it supports.

The environment has what the package depends on, and none of the tools that would need newer versions of it. A test
that imports what is missing is skipped, and so is a source file that does. Anything else that is missing fails.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

FOLDERS = ("contract", "fuzz", "tamper", "unit", "vectors")
"""What is collected. Services, other engines and packaging are tested with what the extras bring."""

NEEDS_NEWER: dict[str, list[str]] = {
    "pyarrow 24 writes Bloom filters": [
        "fuzz/test_mutants.py",
        "unit/conformance/test_hostile_files.py",
        "unit/conformance/test_verification.py::test_inspection_shows_both_modules_of_a_bloom_filter",
        "unit/encryption/test_plaintext_footer.py",
        "unit/format/test_other_types.py",
        "unit/view/test_plain_file.py::test_neighbouring_chunks_of_a_remote_file_take_one_read",
        "unit/view/test_plain_file.py::test_ranges_are_slices_of_the_whole",
        "vectors/test_vector_kit.py",
    ],
    "pyarrow 20 decrypts in several threads, and 23 finds external key material": [
        "unit/arrow/test_decryption_properties.py",
        "unit/arrow/test_call_counts.py",
        "unit/arrow/test_metadata.py::test_offsets_are_those_of_the_encrypted_file_as_pyarrow_has_them",
        "unit/rotation/test_rekeying_in_processes.py",
        "tamper/test_attacks.py::test_pyarrow",
        "tamper/test_foreign_files.py::test_a_file_that_names_no_keys_is_under_those_that_the_configuration_names",
        "tamper/test_foreign_files.py::test_files_of_an_older_schema_and_without_rows_are_files_of_the_table",
        "tamper/test_prefix_boundary.py::test_pyarrow_reads_part10_as_part1",
        "tamper/test_prefix_boundary.py::test_pyarrow_takes_a_data_page_for_a_footer",
        "tamper/test_prefix_boundary.py::test_the_honest_file_is_read",
        "tamper/test_reading.py::test_a_file_of_ctr_may_be_refused",
        "tamper/test_reading.py::test_a_url_in_key_material_is_not_called",
        "tamper/test_reading.py::test_altered_fields_of_the_footers_key_material",
        "tamper/test_reading.py::test_column_metadata_that_is_damaged",
        "tamper/test_reading.py::test_kek_of_another_key",
        "tamper/test_silent_failures.py::test_named_columns_are_columns",
        "unit/arrow/test_call_counts.py::test_50_files_cost_6_wraps_and_6_unwraps",
        "unit/conformance/test_verification.py::test_a_damaged_index_costs_no_row",
        "unit/conformance/test_verification.py::test_keys_that_only_the_configuration_names_are_told_apart",
        "unit/rotation/test_new_tail.py",
        "unit/rotation/test_rekeying.py::test_other_readers_read_it",
        "unit/rotation/test_rekeying_in_processes.py::test_reports_are_the_same",
        "unit/rotation/test_replaced_keys.py::test_undo",
        "unit/rotation/test_rotate.py",
        "unit/test_keytools.py::test_a_pickle_holds_no_key_and_works",
        "unit/test_keytools.py::test_after_a_fork",
        "unit/test_keytools.py::test_from_yaml",
        "unit/test_keytools.py::test_many_threads",
        "unit/test_keytools.py::test_repr_shows_nothing",
        "unit/test_keytools.py::test_workers_of_a_pool",
    ],
}
"""What the lowest versions lack -> tests, or source files of tests, that need it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the core be tested alone."""
    parser.addoption("--core", action="store_true", help="skip tests that need more than the core's dependencies")


def pytest_configure(config: pytest.Config) -> None:
    """Skip what the core alone cannot run, where asked for."""
    if config.getoption("core"):
        config.pluginmanager.register(_Core(), "core")


class _Core:
    def __init__(self) -> None:
        self._reasons = {test: reason for reason, tests in NEEDS_NEWER.items() for test in tests}

    @pytest.hookimpl
    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Leave out folders."""
        if TESTS not in collection_path.parents:
            return None
        return True if collection_path.relative_to(TESTS).parts[0] not in FOLDERS else None

    @pytest.hookimpl
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Skip tests that need newer versions."""
        for item in items:
            path = item.path.relative_to(TESTS).as_posix()
            name = f"{path}::{item.name.partition('[')[0]}"
            if (reason := self._reasons.get(path) or self._reasons.get(name)) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Skip a file that needs newer versions already when it is imported, or imports what is not installed."""
        report = yield
        if report.outcome == "failed" and (excinfo := report.call.excinfo) is not None:
            path = collector.path.relative_to(TESTS).as_posix()
            reason = self._reasons.get(path) or _missing(excinfo.value.__cause__)
            _skip(report, collector.path, reason)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Skip a test that imports what is not installed."""
        report = yield
        # Where the package itself imports it, users of the package would miss it, too.
        if call.excinfo is not None and TESTS in Path(call.excinfo.traceback[-1].path).parents:
            _skip(report, item.path, _missing(call.excinfo.value))
        return report


def _missing(error: BaseException | None) -> str | None:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"{error.name.partition('.')[0]} is not installed"
    return None


def _skip(report: pytest.CollectReport | pytest.TestReport, path: Path, reason: str | None) -> None:
    if reason is not None:
        report.outcome = "skipped"
        report.longrepr = (str(path), 0, f"Skipped: {reason}")
