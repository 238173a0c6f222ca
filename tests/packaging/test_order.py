"""tests/order.py names files that there are."""

from pathlib import Path

from order import LONGEST_FIRST, SPARK_CLUSTER, file_of, position

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


def test_the_longest_begin_first() -> None:
    node_id = "tests/services/test_spark_bridge.py::test_x[a::b]"
    assert file_of(node_id) == "services/test_spark_bridge.py"
    assert position(node_id) < position("tests/unit/test_errors.py::test_x")
