"""Spark for these tests, in one JVM; and the handling of a missing Java."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from matrix import Matrix

if TYPE_CHECKING:
    from engines.spark import Spark

WITHOUT_SPARK = os.environ.get("SPARK") == "no"
JAVA_MISSING = (
    "the tests with Spark need Java 17: install it with `apt-get install openjdk-17-jre-headless`, or leave these "
    "tests out with `make test SPARK=no`"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """End the run before its first test if Java is needed and missing."""
    needed = any("spark" in getattr(item, "fixturenames", ()) for item in items)
    if needed and not WITHOUT_SPARK and not _has_java():
        raise pytest.UsageError(JAVA_MISSING)


def _has_java() -> bool:
    home = os.environ.get("JAVA_HOME")
    return shutil.which("java", path=str(Path(home) / "bin") if home else None) is not None


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spark]:
    """Spark, started once."""
    if WITHOUT_SPARK:
        pytest.skip("SPARK=no leaves the tests with Spark out")
    from engines.spark import Spark, spark_session

    with spark_session(tmp_path_factory.mktemp("spark")) as session:
        yield Spark(session)


@pytest.fixture(scope="session")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    """All engines but Spark, and the files that they wrote so far."""
    return Matrix(tmp_path_factory.mktemp("matrix"))


@pytest.fixture(scope="session")
def matrix_with_spark(matrix: Matrix, spark: Spark) -> Matrix:
    """All engines, and the files that they wrote so far."""
    matrix.add_spark(spark)
    return matrix
