"""Engines without encryption, times the ways to show them encrypted files: each cell is correct."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from soak import SOAK
from view_matrix import COLUMNS, ENGINES, FILES, HYPARQUET_ROW, Hyparquet, ViewMatrix, cells_of_page, view_matrix

SLOW = {("Ray", "fsspec")}
"""These rows start many processes: they run in a soak only. docs/engines.md, which always runs, has Ray, too."""


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ViewMatrix]:
    # Each costs the same time again, and no engine is to change its way between 20 and 100.
    with view_matrix(tmp_path_factory.mktemp("views"), FILES if SOAK else 20) as made:
        yield made


@pytest.mark.parametrize("row", ENGINES, ids=" ".join)
def test_the_documentation_shows_what_was_found(matrix: ViewMatrix, row: tuple[str, str]) -> None:
    columns = () if row in SLOW and not SOAK else COLUMNS
    documented = dict(zip(COLUMNS, cells_of_page()[row], strict=True))
    found = {column: matrix.outcome(ENGINES[row], column) for column in columns}
    assert found == {column: documented[column] for column in columns}, "run: python tests/interop/view_matrix.py"


if SOAK:
    # packaging/test_serve_recipe.py, which always runs, reads with hyparquet, too.
    def test_hyparquet(matrix: ViewMatrix, tmp_path_factory: pytest.TempPathFactory) -> None:
        hyparquet = Hyparquet.install(tmp_path_factory.mktemp("node"))
        found = [matrix.outcome(hyparquet, column) for column in COLUMNS] if hyparquet else None
        assert found in (None, cells_of_page()[HYPARQUET_ROW])


def test_no_other_rows_are_documented() -> None:
    assert cells_of_page().keys() == {*ENGINES, HYPARQUET_ROW}
