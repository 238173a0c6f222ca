"""Services that the tests start; one that does not start fails the run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openbao import OpenBao

pytest.register_assert_rewrite("parquet_keytools.kms.contract_tests")


@pytest.fixture(scope="session")
def openbao(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenBao]:
    """An OpenBao server for all tests that leave it running."""
    server = OpenBao(tmp_path_factory.mktemp("openbao"), in_memory=True)
    try:
        server.start()
        yield server
    finally:
        server.stop()
