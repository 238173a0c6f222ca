"""The order of tests: tests/order.py names existing files, a soak runs all samples, and crashes end a run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import hypothesis
import soak
from order import LONGEST_FIRST, SPARK_CLUSTER, SPARK_FIXTURE, file_of, position

TESTS = Path(__file__).parents[1]


def test_all_files_are_there() -> None:
    assert [name for name in LONGEST_FIRST if not (TESTS / name).is_file()] == []


def test_files_of_the_cluster_are_one_group() -> None:
    assert LONGEST_FIRST["services/test_spark_bridge.py"] == SPARK_CLUSTER
    users = {
        str(path.relative_to(TESTS))
        for path in TESTS.rglob("test_*.py")
        if "spark_cluster:" in path.read_text(encoding="utf-8") or '"spark_cluster"' in path.read_text("utf-8")
    } - {"packaging/test_order.py"}
    assert users == {name for name, group in LONGEST_FIRST.items() if group == SPARK_CLUSTER}


def test_files_that_share_a_session_of_spark_are_one_group() -> None:
    """In another process they would start another JVM, and could find a session that others stopped."""
    users = {
        f"interop/{path.name}"
        for path in (TESTS / "interop").glob("test_*.py")
        if re.search(r"\b(spark: Spark|matrix_with_spark: Matrix)\b", path.read_text("utf-8"))
    }
    assert users == {name for name, group in LONGEST_FIRST.items() if group == SPARK_FIXTURE}


def test_the_longest_begin_first() -> None:
    node_id = "tests/services/test_spark_bridge.py::test_x[a::b]"
    assert file_of(node_id) == "services/test_spark_bridge.py"
    assert position(node_id) < position("tests/unit/test_errors.py::test_x")


def test_what_takes_samples_is_in_the_soak() -> None:
    """A soak runs all of it, and draws other examples; otherwise they would never run."""
    users = {
        path
        for path in TESTS.rglob("test_*.py")
        if re.search("^from (soak|hypothesis) import", path.read_text("utf-8"), re.M)
    }
    named = re.findall(r"tests/[\w/.]+", (TESTS.parent / "Makefile").read_text("utf-8").partition("\nsoak:")[2])
    places = [TESTS.parent / name for name in named]
    assert len(users) > 10
    assert [str(path) for path in users if not any(path.is_relative_to(place) for place in places)] == []


def test_run_ends_as_failed_where_a_process_dies(tmp_path: Path) -> None:
    """With the name of the test: after a segmentation fault in a library, the run must not wait forever."""
    (tmp_path / "test_a.py").write_text("def test_first(): pass\ndef test_second(): assert False, 'seen'\n")
    (tmp_path / "test_b.py").write_text("import os\ndef test_well(): pass\ndef test_dies(): os.abort()\n")
    (tmp_path / "test_c.py").write_text("import time\ndef test_long(): time.sleep(1000)\ndef test_last(): pass\n")
    groups = ["--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "order", *groups, "--rootdir=.", "."],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 1, run.stdout
    assert "FAILED test_b.py::test_dies" in run.stdout
    assert "a process of the tests died while it ran test_b.py::test_dies" in run.stdout


def test_generated_examples_depend_neither_on_chance_nor_on_haste() -> None:
    assert hypothesis.settings.default is not None
    assert hypothesis.settings.default.deadline is None
    assert hypothesis.settings.default.derandomize is not soak.SOAK
