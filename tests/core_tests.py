"""`--core`: run the tests that need only the core's own dependencies, at the lowest supported versions.

The environment has the package's dependencies, and no tools that would need newer versions of them. A test
or source file that imports a missing package of these tools is skipped. Any other missing package is a failure.
"""

from __future__ import annotations

from collections.abc import Generator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

FOLDERS = ("contract", "fuzz", "tamper", "unit", "vectors")
"""What is collected. Services, other engines and packaging are tested with the extras installed."""

NEEDS_NEWER: dict[str, list[str]] = {
    "pyarrow before 24 writes no Bloom filters": [
        "unit/conformance/test_verification.py::test_inspection_shows_both_modules_of_a_bloom_filter",
        "unit/conformance/test_hostile_files.py::test_a_required_field_that_is_missing[*-bloom-filter]",
        "vectors/test_vector_kit.py::test_exactly_its_rules_are_reported[*bloom-filter*",
        "vectors/test_vector_kit.py::test_good_files_check_every_rule_somewhere",
    ],
    "pyarrow 18 reads 96-bit timestamps before 1970 as those of another century, so their files are refused": [
        "unit/erasure/test_rewrite_rows.py::test_a_file_as_spark_writes_it",
    ],
    "pyarrow 18 writes no string views": [
        "unit/erasure/test_rewrite_rows.py::test_types_that_pyarrow_cannot_filter_*[string view]",
    ],
    "pyarrow before 25 takes no keys in place of a KMS": [
        "tamper/test_foreign_files.py::test_a_file_that_names_no_keys_is_under_those_that_the_configuration_names",
        "tamper/test_prefix_boundary.py::test_pyarrow_reads_part10_as_part1",
        "tamper/test_prefix_boundary.py::test_pyarrow_takes_a_data_page_for_a_footer",
    ],
    "pyarrow before 23 neither writes nor finds external key material": [
        "tamper/test_attacks.py::test_pyarrow",
        "tamper/test_rotation_concurrency.py::test_many_rotate_and_read",
        "unit/tables/test_call_counts.py::test_many_files_cost_6_wraps_and_6_unwraps[encryption_properties]",
        "unit/rotation/test_rekeying.py::test_other_readers_read_it[external]",
        "unit/rotation/test_rotate.py::test_encoded_master_key_ids_stay_encoded[external]",
        "unit/rotation/test_rotate.py::test_everything_reads_when_the_old_version_is_disabled[external-*",
        "unit/rotation/test_rotate.py::test_files_of_pyarrow[False-*",
        "unit/rotation/test_rotate.py::test_moves_to_another_master_key[external-*",
        "unit/rotation/test_rotate.py::test_new_keks[external-*",
        "unit/rotation/test_rotate.py::test_to_another_kms[*-external]",
    ],
    "pyarrow before 21 does not encrypt all columns with the footer key": [
        "unit/tables/test_format_limits.py::test_as_many_as_there_are_ordinals_fit[*-pyarrow]",
        "unit/rotation/test_rotate.py::test_uniform_file_of_pyarrow",
    ],
    "pyarrow before 20 does not decrypt in several threads: decryption_properties is refused": [
        "tamper/test_reading.py::test_a_file_of_ctr_may_be_refused[decryption_properties]",
        "tamper/test_kms_failures.py::test_other_columns_go_on[parquet_*",
        "tamper/test_kms_failures.py::test_other_columns_go_on[plain_*",
        "tamper/test_kms_failures.py::test_reading_what_is_refused[pandas*",
        "tamper/test_kms_failures.py::test_reading_what_is_refused[parquet_*",
        "tamper/test_kms_failures.py::test_reading_what_is_refused[plain_*",
        "tamper/test_kms_failures.py::test_reading_what_is_refused[properties_*",
        "tamper/test_prefix_boundary.py::test_a_prefix_of_bytes_in_every_reader",
        "tamper/test_reading.py::test_kek_of_another_key",
        "tamper/test_silent_failures.py::test_named_columns_are_columns",
        "unit/tables/test_call_counts.py::test_single_wrapping_with_plain_pyarrow",
        "unit/tables/test_metadata.py::test_offsets_are_those_of_the_encrypted_file_as_pyarrow_has_them",
    ],
    "pyarrow before 20 refuses to write two files with the same encryption properties": [
        "unit/cli/test_processes.py::test_files_that_share_keys_are_found_in_whatever_process",
        "unit/files/test_file_identities.py::test_a_folder_is_refused",
        "unit/files/test_file_identities.py::test_a_folder_is_refused_where_the_index_is_read_too",
        "unit/files/test_file_identities.py::test_commands_refuse_report_and_repair",
        "unit/files/test_file_identities.py::test_rekey_of_a_folder_gives_each_file_its_own",
        "unit/files/test_file_identities.py::test_single_reads_warn_once_both_were_seen",
        "unit/files/test_file_identities.py::test_the_setting_allows_it_without_a_word",
        "unit/files/test_file_identities.py::test_two_writes_with_the_same_properties_share_them",
        "unit/files/test_file_identities.py::test_what_a_filter_leaves_out_is_not_compared",
    ],
    "pyarrow before 20 gives a single file the columns of its folders' names": [
        "unit/tables/test_partition_types.py::test_a_list_of_files_has_them_too",
    ],
    "pandas 3.1 takes no file system of fsspec 2024.2": [
        "unit/view/test_linked_folders.py::test_no_overwrite_empties_a_linked_partition[pandas-*",
    ],
    "polars is not installed": [
        "tamper/test_process_ends.py::test_a_program_ends_with_its_own_status[Polars *",
    ],
    "pyiceberg is not installed": [
        "unit/cli/test_iceberg.py",
    ],
    "pyspark is not installed": [
        "tamper/test_hostile_rotation.py::test_in_spark_no_task_has_it_re_wrapped",
        "tamper/test_links_out_of_a_folder.py::test_spark_does_not_follow_them",
        "unit/cli/test_spark_cli.py",
        "unit/spark/test_pipelines.py",
        "unit/spark/test_session.py::test_a_compiler_that_fails",
        "unit/spark/test_session.py::test_a_session_that_does_not_find_our_classes_stays_as_it_is",
        "unit/spark/test_session.py::test_a_session_that_runs_gets_all_settings_and_the_jar",
        "unit/spark/test_session.py::test_a_session_that_takes_no_jar_stays_as_it_is",
        "unit/spark/test_session.py::test_no_java",
    ],
    "typer 0.16 imports Rich at once": [
        "unit/cli/test_inspect_verify.py::test_inspect_without_keys_imports_no_pyarrow",
        "unit/cli/test_main.py::test_help_imports_nothing_slow",
    ],
    "fsspec 2024.2 fails at a link to itself": [
        "unit/view/test_linked_folders.py::test_what_links_lead_to_stays[contents-dir]",
        "unit/view/test_linked_folders.py::test_what_links_lead_to_stays[pyarrow's handler, contents-dir]",
    ],
}
"""Missing feature of the lowest versions -> tests that need it, as patterns, or source files of tests."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that tests the core alone."""
    parser.addoption("--core", action="store_true", help="skip tests that need more than the core's dependencies")


def pytest_configure(config: pytest.Config) -> None:
    """Skip what the core alone cannot run, if the option is set."""
    if config.getoption("core"):
        config.pluginmanager.register(_Core(), "core")


def _reason(test: str) -> str | None:
    """Return why a test, or a source file, needs newer versions; a name without parameters means all its tests."""
    names = (test, test.partition("[")[0], test.partition("::")[0])
    for reason, tests in NEEDS_NEWER.items():
        # A bracket begins parameters, not a set of characters.
        if any(fnmatchcase(name, known.replace("[", "[[]")) for known in tests for name in names):
            return reason
    return None


class _Core:
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
            if (reason := _reason(f"{item.path.relative_to(TESTS).as_posix()}::{item.name}")) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Skip a file whose import already needs newer versions or a missing package."""
        report = yield
        if report.outcome == "failed" and (excinfo := report.call.excinfo) is not None:
            reason = _reason(collector.path.relative_to(TESTS).as_posix()) or _missing(excinfo.value.__cause__)
            _skip(report, collector.path, reason)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Skip a test that imports a missing package."""
        report = yield
        # If the package itself imports it, users would miss it, too.
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
