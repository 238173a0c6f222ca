"""Files of other tables, and forged ones, with KMS servers: trust is per table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from aws_fake import FakeKms, serve
from openbao import OpenBao

from parquet_keytools import Keytools
from parquet_keytools.errors import ColumnAccessDeniedError, MasterKeyDisabledError, TableMismatchError

TABLE = pa.table({"plain": range(50), "name": [f"secret {number}" for number in range(50)], "at": range(50)})
POLICY: dict[str, Any] = {
    "footer_key": "footer",
    "column_keys": {"pii": ["name"], "times": ["at"]},
    "unlisted_columns": "plaintext",
}
NAMES = ("footer", "pii", "times", "ads")
FORGERIES: dict[str, dict[str, Any]] = {
    "another table": {"footer_key": "ads", "unlisted_columns": "footer_key"},
    "footer": POLICY | {"footer_key": "ads"},
    "column": POLICY | {"column_keys": {"ads": ["name"], "times": ["at"]}},
    "plaintext": POLICY | {"column_keys": {"times": ["at"]}},
    "swapped": POLICY | {"column_keys": {"times": ["name"], "pii": ["at"]}},
    "under the footer key": {"footer_key": "footer", "unlisted_columns": "footer_key"},
}


def document(kms: dict[str, Any], master_keys: dict[str, str], **reading: str) -> dict[str, Any]:
    tables = {"own": POLICY, "ads": {"footer_key": "ads", "unlisted_columns": "footer_key"}, **FORGERIES}
    return {"version": 1, "kms": kms, "master_keys": master_keys, "tables": tables, "reading": reading}


@pytest.fixture(params=["vault", "aws key ARN", "aws alias"])
def made(request: pytest.FixtureRequest, openbao: OpenBao, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A configuration whose KMS is a server."""
    if request.param == "vault":
        kms = {"type": "vault", "url": openbao.url, "token": openbao.root_token}
        yield document(kms, {name: openbao.create_key() for name in NAMES})
        return
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    fake = FakeKms()
    keys = {name: fake.add_key(name) for name in NAMES}
    with serve(fake) as url:
        kms = {
            "type": "aws",
            "region": "eu-west-1",
            "endpoint_url": url,
            "access_key_id": "AKIAEXAMPLE",
            "secret_access_key": "secret",
        }
        ids = {name: key.arn for name, key in keys.items()}
        if request.param == "aws alias":
            ids = {name: f"alias/{name}" for name in NAMES}
        yield document(kms, ids)


USES: dict[str, Callable[[Keytools, Path, Path], object]] = {
    "read_table": lambda tools, path, out: tools.read_table(path, columns=["plain"], table_name="own"),
    "dataset": lambda tools, path, out: tools.dataset(path.parent, table_name="own"),
    "decryption_properties": lambda tools, path, out: tools.decryption_properties(path, table_name="own"),
    "decrypt_file": lambda tools, path, out: tools.decrypt_file(path, out, table_name="own"),
    "salvage_file": lambda tools, path, out: tools.salvage_file(path, out, table_name="own"),
    "rekey_file": lambda tools, path, out: tools.rekey_file(path, out, table_name="own"),
    "rekey_in_place": lambda tools, path, out: tools.rekey_in_place(path, table_name="own"),
}


def test_nothing_is_unwrapped_for_a_file_of_another_table(made: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    path, out = folder / "x.parquet", tmp_path / "out.parquet"
    for forgery in FORGERIES:
        with Keytools.from_mapping(made) as attacker:
            attacker.write_table(TABLE, path, table_name=forgery)
        before = path.read_bytes()
        for name, use in USES.items():
            if forgery not in ("another table", "column") and name != "read_table":
                continue
            with Keytools.from_mapping(made) as tools:
                with pytest.raises(TableMismatchError, match="this is not a file of the table 'own'"):
                    use(tools, path, out)
                assert tools.kms is not None
                # The others have their own footer key, which must be unwrapped to see columns.
                asked = 0 if forgery in ("another table", "footer") else 1
                assert tools.kms.call_counts["unwrap"] == asked, (forgery, name)
                assert tools.kms.call_counts["wrap"] == 0, (forgery, name)
            assert path.read_bytes() == before and not out.exists(), (forgery, name)
            assert [entry.name for entry in folder.iterdir()] == ["x.parquet"]
    with Keytools.from_mapping(made) as tools:
        tools.write_table(TABLE, path, table_name="own")
        assert tools.read_table(path, table_name="own").equals(TABLE)


def test_a_version_that_is_no_more_allowed_hides_no_column(openbao: OpenBao, tmp_path: Path) -> None:
    """The version that wrapped a key is in the wrapped key, and nothing beside the file authenticates it."""
    ids = {name: openbao.create_key() for name in NAMES}
    kms = {"type": "vault", "url": openbao.url, "token": openbao.root_token}
    made = document(kms, ids, denied_columns="hide")
    made["tables"] = {"own": POLICY | {"key_material": "external", "double_wrapping": False}}
    path = tmp_path / "x.parquet"
    openbao.rotate_key(ids["pii"])
    with Keytools.from_mapping(made) as tools:
        tools.write_table(TABLE, path)
        assert tools.read_table(path).equals(TABLE)
    openbao.configure_key(ids["pii"], min_decryption_version=2)
    beside = tmp_path / "_KEY_MATERIAL_FOR_x.parquet.json"
    materials = {name: json.loads(text) for name, text in json.loads(beside.read_text()).items()}
    edited = next(fields for fields in materials.values() if fields["masterKeyID"] == ids["pii"])
    assert edited["wrappedDEK"].startswith("vault:v2:")
    edited["wrappedDEK"] = edited["wrappedDEK"].replace("vault:v2:", "vault:v1:")
    beside.write_text(json.dumps({name: json.dumps(fields) for name, fields in materials.items()}))
    with Keytools.from_mapping(made) as tools:
        with pytest.raises(ColumnAccessDeniedError) as caught:
            tools.read_table(path)
        assert isinstance(caught.value.causes[0], MasterKeyDisabledError)
        with pytest.raises(ColumnAccessDeniedError):
            tools.dataset(path.parent)
