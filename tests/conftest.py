"""What many tests need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def parquet_test_data() -> Path:
    """The folder of the public Parquet test files."""
    default = REPOSITORY.parent / "shared" / "parquet-testing" / "data"
    folder = Path(os.environ.get("PARQUET_TEST_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"there are no Parquet test files in {folder}; set PARQUET_TEST_DATA")
    return folder
