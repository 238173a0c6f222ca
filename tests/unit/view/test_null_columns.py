"""`denied_columns: null`: refused columns are null, and the schema is the same for all readers."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from view_case import ViewCase, parquet_bytes

from parquet_keytools.errors import ColumnAccessDeniedError, KmsUnavailableError

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("amount", pa.float64(), nullable=False),
        pa.field("deep", pa.struct([pa.field("a", pa.int32()), pa.field("b", pa.list_(pa.string()))])),
    ]
)
TABLE = pa.table(
    {"id": range(30), "amount": [n / 3 for n in range(30)], "deep": [{"a": n, "b": ["x"]} for n in range(30)]},
    SCHEMA,
)


@pytest.fixture(params=["internal", "external"])
def case(tmp_path: Path, request: pytest.FixtureRequest) -> ViewCase:
    table = {"column_keys": {"public": ["id"], "secret": ["amount", "deep.b"]}, "key_material": request.param}
    return ViewCase(tmp_path, {**table, "unlisted_columns": "footer_key"}, {"denied_columns": "null"})


def test_a_table_has_the_same_schema_with_and_without_the_key(case: ViewCase) -> None:
    path = case.encrypt(parquet_bytes(TABLE, row_group_size=7))
    allowed = case.keytools().read_table(path)
    assert allowed.to_pydict() == TABLE.to_pydict()
    case.kms.deny("secret")
    refused = case.keytools().read_table(path)
    assert refused.schema.equals(allowed.schema, check_metadata=True)
    assert [field.nullable for field in refused.schema] == [True, True, True]
    assert refused["id"].to_pylist() == list(range(30))
    assert refused["amount"].null_count == refused["deep"].null_count == 30
    assert case.keytools().read_table(path, columns=["amount"]).to_pydict() == {"amount": [None] * 30}
    assert case.keytools().read_table(path, filters=[("amount", ">", 1)]).num_rows == 0
    assert case.keytools().read_table(path, filters=[("id", ">", 27)]).num_rows == 2


def test_a_data_set_has_nulls(case: ViewCase) -> None:
    for number in range(3):
        case.encrypt(parquet_bytes(TABLE, row_group_size=11), f"{number}.parquet")
    for path in case.folder.glob("_plain*"):
        path.unlink()
    allowed = case.keytools().dataset(case.folder)
    assert allowed.count_rows(filter=ds.field("amount") > 5) == 3 * 14
    case.kms.deny("secret")
    refused = case.keytools().dataset(case.folder)
    assert refused.schema.equals(allowed.schema)
    table = refused.to_table(filter=ds.field("id") > 9)
    assert table.num_rows == 60 and table["amount"].null_count == table["deep"].null_count == 60
    assert refused.count_rows(filter=ds.field("amount").is_null()) == 90
    assert case.keytools().read_table(case.folder)["id"].to_pylist() == [*range(30)] * 3


def test_only_a_refusal_makes_nulls(case: ViewCase, monkeypatch: pytest.MonkeyPatch) -> None:
    path = case.encrypt(parquet_bytes(TABLE))
    unwrap = case.kms._unwrap

    def down(wrapped_key: str, master_key_id: str) -> object:
        if master_key_id == "secret":
            raise KmsUnavailableError("no answer", backend="in_memory", operation="unwrap")
        return unwrap(wrapped_key, master_key_id)

    monkeypatch.setattr(case.kms, "_unwrap", down)
    with pytest.raises((ColumnAccessDeniedError, KmsUnavailableError)):
        case.keytools().read_table(path)
    with pytest.raises((ColumnAccessDeniedError, KmsUnavailableError)):
        case.keytools().dataset(case.folder / "x.parquet").to_table()


def test_a_kms_that_is_down_makes_no_nulls_beside_a_refused_column(
    case: ViewCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = case.encrypt(parquet_bytes(TABLE))
    case.kms.deny("public")
    unwrap = case.kms._unwrap

    def down(wrapped_key: str, master_key_id: str) -> object:
        if master_key_id == "secret":
            raise KmsUnavailableError("no answer", backend="in_memory", operation="unwrap")
        return unwrap(wrapped_key, master_key_id)

    monkeypatch.setattr(case.kms, "_unwrap", down)
    found = case.keytools().dataset(path, columns=[])
    assert found.to_table(columns=["id"])["id"].null_count == 30
    with pytest.raises((ColumnAccessDeniedError, KmsUnavailableError)):
        found.to_table(columns=["amount"])
