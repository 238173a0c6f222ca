"""Which tests run one after the other in one process, and which of them begin first.

What takes longest begins first, so that no core is idle at the end. A file that is not named here is a group of
its own; the tests on a cluster of Spark share it, and so are one group.
"""

from __future__ import annotations

from typing import Any

import pytest

SPARK_CLUSTER = "cluster of Spark"

LONGEST_FIRST: dict[str, str] = {
    "services/test_spark_pipelines.py": SPARK_CLUSTER,
    "services/test_spark_bridge.py": SPARK_CLUSTER,
    "services/test_spark_openbao.py": SPARK_CLUSTER,
    "services/test_spark_ways.py": "ways of Spark",
    "tamper/test_walk_matrix.py": "walks",
    "tamper/test_rotation_crashes.py": "crashes",
    "tamper/test_write_crashes.py": "crashes of writers",
    "tamper/test_two_users.py": "two users",
    "interop/test_spark_files.py": "interop with Spark",
    "interop/test_rotated_files.py": "interop with Spark",
    "interop/test_matrix.py": "interop with Spark",
    "services/test_s3_rotation.py": "rotation in S3",
    "packaging/test_examples.py": "examples",
    "services/test_spark_prefixes.py": "prefixes in Spark",
    "packaging/test_engines_page.py": "page on engines",
    "interop/test_view_matrix.py": "views",
    "packaging/test_readme.py": "README",
    "packaging/test_rotation_page.py": "page on rotation",
    "services/test_keys_in_use.py": "keys in use",
    "tamper/test_kms_failures.py": "failures of a KMS",
    "tamper/test_silent_failures.py": "silent failures",
    "packaging/test_demo.py": "demo",
    "packaging/test_wheel.py": "wheel",
    "tamper/test_iceberg_crashes.py": "crashes of Iceberg writers",
    "unit/iceberg/test_writing.py": "tables of Iceberg",
    "tamper/test_iceberg_users.py": "users of an Iceberg table",
    "unit/arrow/test_call_counts.py": "number of calls",
}
"""File -> group, in the order in which they begin."""

_ORDER = {name: position for position, name in enumerate(LONGEST_FIRST)}


def file_of(node_id: str) -> str:
    """Return the file of a test, below `tests/`."""
    return node_id.partition("::")[0].removeprefix("tests/")


def position(node_id: str) -> int:
    """Return when the file of a test begins, compared with others."""
    return _ORDER.get(file_of(node_id), len(_ORDER))


def scheduler(config: Any, log: Any) -> Any:
    """Return what hands groups to the processes of pytest-xdist."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = file_of(nodeid)
            return LONGEST_FIRST.get(file, file)

    return Groups(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let groups, not files, run one after the other in one process."""
    return scheduler(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport, sched: Any) -> None:
    """End the run as failed where a process died.

    pytest-xdist would run the test again, in up to eight processes, and also hand out groups of which nothing is
    left to run; a process that gets one waits for ever.
    """
    sched.config.hook.pytest_runtest_logreport(report=report)
    pytest.exit(f"a process of the tests died while it ran {crashitem}", returncode=pytest.ExitCode.TESTS_FAILED)
