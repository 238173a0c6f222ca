"""Files under master keys in an HSM and in Azure: both writers, and every reader that can use our keys."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest
from azure_fake import fake_vault
from engines.sample import FLAT_COLUMNS, TABLE
from softhsm import SoftHsm, needs_softhsm

from parquet_keytools import Keytools
from parquet_keytools.kms.pkcs11 import Pkcs11Kms, Pkcs11Settings

FLAT = TABLE.select(FLAT_COLUMNS)


def hsm(folder: Path, monkeypatch: pytest.MonkeyPatch, stack: contextlib.ExitStack) -> dict[str, Any]:
    """SoftHSM, through PKCS#11."""
    settings = SoftHsm(folder, monkeypatch).settings()
    with Pkcs11Kms(Pkcs11Settings.model_validate(settings)) as kms:
        for name in ("footer", "pii"):
            kms.create_key(name)
    return settings


def azure(folder: Path, monkeypatch: pytest.MonkeyPatch, stack: contextlib.ExitStack) -> dict[str, Any]:
    """A fake of Azure Key Vault, with an RSA key and a key of a Managed HSM."""
    vault = stack.enter_context(fake_vault(folder / "vault", "footer"))
    vault.add_key("pii", "oct-HSM")
    for name, value in {**vault.environment(), "REQUESTS_CA_BUNDLE": str(vault.ca_file)}.items():
        monkeypatch.setenv(name, value)
    return {"type": "azure", "vault_url": vault.url, "login": "managed_identity"}


@pytest.fixture(params=[pytest.param(hsm, marks=needs_softhsm), azure])
def keytools(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Keytools]:
    with contextlib.ExitStack() as stack:
        settings = request.param(tmp_path, monkeypatch, stack)
        table = {"footer_key": "footer", "column_keys": {"pii": FLAT_COLUMNS[:1]}, "unlisted_columns": "plaintext"}
        tables = {"arrow": table, "module": table | {"aad_prefix": "{file_name}"}}
        yield stack.enter_context(Keytools.from_mapping({"version": 1, "kms": settings, "tables": tables}))


def by_duckdb(keytools: Keytools, path: Path, name: str) -> list[dict[str, Any]]:
    with duckdb.connect() as connection:
        connection.register_filesystem(keytools.view(path.parent, table_name=name))
        found = connection.sql(f"from 'keytools://{path.name}'").fetchall()
    return [dict(zip(FLAT_COLUMNS, row, strict=True)) for row in found]


def by_pyarrow(keytools: Keytools, path: Path, name: str) -> list[dict[str, Any]]:
    properties = keytools.decryption_properties(path, table_name=name)
    return pq.ParquetFile(path, decryption_properties=properties).read().to_pylist()


READERS: dict[str, Callable[[Keytools, Path, str], list[dict[str, Any]]]] = {
    "read_table": lambda keytools, path, name: keytools.read_table(path, table_name=name).to_pylist(),
    "dataset": lambda keytools, path, name: keytools.dataset(path, table_name=name).to_table().to_pylist(),
    "Polars": lambda keytools, path, name: keytools.scan_polars(path, table_name=name).collect().to_dicts(),
    "pyarrow": by_pyarrow,
    "DuckDB": by_duckdb,
}


@pytest.mark.parametrize("name", ["arrow", "module"])
def test_every_reader(keytools: Keytools, tmp_path: Path, name: str) -> None:
    path = tmp_path / "files" / "people.parquet"
    path.parent.mkdir()
    written = keytools.write_table(FLAT, path, table_name=name)
    assert written.engine == ("pyarrow" if name == "arrow" else "module encryptor")
    expected = FLAT.to_pylist()
    for reader, read in READERS.items():
        assert read(keytools, path, name) == expected, reader
