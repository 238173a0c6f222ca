"""Labels of columns: `classes`, `labels_from` and `unlabelled`."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from parquet_keytools import Keytools, load_configuration, parse_configuration
from parquet_keytools.errors import ConfigurationError, FolderNameError, KeytoolsError
from parquet_keytools.files.field_labels import labels_of_schema

CLASSES = {
    "pii": {"key": "pii"},
    "payment": {"key": "pci"},
    "public": "plaintext",
}

MASTER_KEYS = {
    name: base64.b64encode(name.ljust(16).encode()).decode() for name in ("footer", "pii", "pci", "other")
}

Make = Callable[..., Keytools]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Creates a `Keytools` whose table `customers` has labels."""

    def tools(*sources: dict[str, Any], more: dict[str, Any] | None = None, **table: Any) -> Keytools:
        document = {
            "version": 1,
            "kms": {"type": "in_memory", "keys": MASTER_KEYS},
            "classes": CLASSES,
            "tables": {"customers": {"footer_key": "footer", "labels_from": list(sources), **table}},
            **(more or {}),
        }
        return Keytools(parse_configuration(document, file=tmp_path / "keytools.yaml"))

    return tools


def csv_source(folder: Path, **labels: str) -> dict[str, str]:
    lines = [f"{column.replace('__', '.')},{name}" for column, name in labels.items()]
    (folder / "labels.csv").write_text("\n".join(["column,class", *lines]) + "\n", encoding="utf-8")
    return {"csv": "labels.csv"}


def keys(tools: Keytools, path: Path) -> dict[str, str | None]:
    """Return the key of each column of a file."""
    shown = tools.inspect_file(path)
    return {column.path: column.key.name if column.key else None for column in shown.columns}


def labelled(name: str, kind: pa.DataType, label: str | None) -> pa.Field:
    return pa.field(name, kind, metadata=None if label is None else {"class": label})


BY_LABEL = {"id": None, "email": "pii", "card.number": "pci", "card.year": "pci"}
TABLE = pa.table({"id": [1, 2], "email": ["a@b", "c@d"], "card": [{"number": "4", "year": 1}, None]})


def test_labels_of_a_csv_file(make: Make, tmp_path: Path) -> None:
    tools = make(csv_source(tmp_path, id="public", EMAIL="pii", card="payment"))
    result = tools.write_table(TABLE, tmp_path / "x.parquet")
    assert result.plaintext_columns == ("id",)
    assert keys(tools, tmp_path / "x.parquet") == {
        "id": None,
        "email": "pii",
        "card.number": "pci",
        "card.year": "pci",
    }
    assert tools.read_table(tmp_path / "x.parquet").equals(TABLE)
    assert tools.verify_file(tmp_path / "x.parquet").conforms


def test_a_column_without_a_label_is_an_error(make: Make, tmp_path: Path) -> None:
    tools = make(csv_source(tmp_path, id="public", email="pii"))
    with pytest.raises(ConfigurationError, match=r"unlabelled.*'card\.number', 'card\.year'"):
        tools.write_table(TABLE, tmp_path / "x.parquet")
    assert not (tmp_path / "x.parquet").exists()


def test_unlabelled_columns_under_a_class(make: Make, tmp_path: Path) -> None:
    source = csv_source(tmp_path, email="pii")
    tools = make(source, unlabelled="payment")
    tools.write_table(TABLE, tmp_path / "x.parquet")
    assert keys(tools, tmp_path / "x.parquet") == {
        "id": "pci", "email": "pii", "card.number": "pci", "card.year": "pci"
    }  # fmt: skip
    tools = make(source, unlabelled="public")
    tools.write_table(TABLE, tmp_path / "y.parquet")
    assert keys(tools, tmp_path / "y.parquet")["id"] is None


def test_a_label_that_no_column_has_is_an_error_where_its_column_would_be_plaintext(
    make: Make, tmp_path: Path
) -> None:
    # The column has another name now.
    tools = make(csv_source(tmp_path, e_mail="pii"), unlabelled="public")
    with pytest.raises(ConfigurationError, match=r"no column is named 'e_mail'.*labels\.csv:2"):
        tools.write_table(TABLE, tmp_path / "x.parquet")
    tools = make(csv_source(tmp_path, e_mail="pii"), unlabelled="pii")
    tools.write_table(TABLE, tmp_path / "x.parquet")


def test_column_keys_override_labels(make: Make, tmp_path: Path) -> None:
    source = csv_source(tmp_path, id="public", email="pii", card="payment")
    tools = make(source, column_keys={"other": ["email", "card.year", "id"]})
    tools.write_table(TABLE, tmp_path / "x.parquet")
    assert keys(tools, tmp_path / "x.parquet") == {
        "id": "other", "email": "other", "card.number": "pci", "card.year": "other"
    }  # fmt: skip


@pytest.mark.parametrize("column", ["email", "e*", "card", "card.number"])
def test_plaintext_columns_do_not_override_a_label_with_a_key(make: Make, tmp_path: Path, column: str) -> None:
    source = csv_source(tmp_path, id="public", email="pii", card="payment")
    tools = make(source, plaintext_columns=[column])
    with pytest.raises(ConfigurationError, match="also listed as plaintext"):
        tools.write_table(TABLE, tmp_path / "x.parquet")


def test_contradicting_labels_name_both_places(make: Make, tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("column,class\n\nemail,payment\n")
    sources = csv_source(tmp_path, id="public", email="pii"), {"csv": "other.csv"}
    with pytest.raises(ConfigurationError, match=r"'email'.*'payment' by other\.csv:3.*'pii' by labels\.csv:3"):
        make(*sources)
    # column_keys takes precedence for the columns that it lists.
    make(*sources, column_keys={"other": ["email"]})
    # A repeated label is no contradiction.
    (tmp_path / "other.csv").write_text("column,class\nemail,pii\n")
    make(*sources)


def test_a_child_is_not_less_protected_than_its_parent(make: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"'card\.year'"):
        make(csv_source(tmp_path, card="payment", card__year="public"))
    tools = make(csv_source(tmp_path, id="public", email="pii", card="public", card__number="payment"))
    tools.write_table(TABLE, tmp_path / "x.parquet")
    found = keys(tools, tmp_path / "x.parquet")
    assert (found["card.number"], found["card.year"]) == ("pci", None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("column,class\nemail,secret\n", "'secret'"),
        ("column,class\nemail\n", "line 2"),
        ("column,class\n,pii\n", "line 2"),
        ("email,pii\n", "first line"),
        ("", "first line"),
    ],
)
def test_mistakes_in_a_csv_file(make: Make, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "labels.csv").write_text(content)
    with pytest.raises(ConfigurationError, match=message):
        make({"csv": "labels.csv"})


@pytest.mark.parametrize("kind", ["csv", "dbt", "contract"])
def test_a_missing_label_file_is_an_error(make: Make, kind: str) -> None:
    with pytest.raises(ConfigurationError, match=r"labels_from\[0\].*cannot be read"):
        make({kind: "missing"})


@pytest.mark.parametrize("kind", ["dbt", "contract"])
@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"metadata": {}}', "a: [", "\x00"])
def test_what_is_no_label_file(make: Make, tmp_path: Path, kind: str, content: str) -> None:
    (tmp_path / "file").write_text(content)
    with pytest.raises(ConfigurationError, match=r"labels_from\[0\]"):
        make({kind: "file"})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"labels_from": [{"arrow": {}}], "unlisted_columns": "plaintext"}, "unlabelled"),
        ({"labels_from": [{"arrow": {}}], "unlabelled": "publik"}, "Did you mean 'public'"),
        ({"labels_from": [], "unlabelled": "public"}, "no labels_from"),
        ({"labels_from": [{}]}, "one of"),
        ({"labels_from": [{"arrow": {}, "csv": "x"}]}, "one of"),
        ({"labels_from": [{"arrow": {}}, {"arrow": {"field": "x"}}]}, "twice"),
    ],
)
def test_mistakes_in_the_table(make: Make, table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make(**{"labels_from": (), **table})


def test_classes_need_keys_that_exist(make: Make) -> None:
    with pytest.raises(ConfigurationError, match=r"classes\.pii\.key.*'pi'"):
        make({"arrow": {}}, more={"classes": {"pii": {"key": "pi"}}})
    with pytest.raises(ConfigurationError, match="no classes"):
        make({"arrow": {}}, more={"classes": {}})


# --- labels that come with the data ---

CARD = pa.struct([labelled("number", pa.string(), "payment"), pa.field("year", pa.int64())])
ORDER = pa.struct([labelled("iban", pa.string(), "payment"), pa.field("sku", pa.string())])
NESTED = pa.schema(
    [
        labelled("id", pa.int64(), None),
        labelled("email", pa.string(), "pii"),
        labelled("address", pa.struct([pa.field("street", pa.string()), pa.field("zip", pa.string())]), "pii"),
        labelled(
            "card", pa.struct([labelled("number", pa.string(), "payment"), pa.field("year", pa.int64())]), None
        ),
        pa.field("phones", pa.list_(labelled("item", pa.string(), "pii"))),
        pa.field(
            "orders", pa.list_(pa.struct([labelled("iban", pa.string(), "payment"), pa.field("sku", pa.string())]))
        ),
        pa.field("notes", pa.map_(pa.string(), labelled("value", pa.string(), "pii"))),
    ]
)
ROW = {
    "id": 1,
    "email": "a@b",
    "address": {"street": "x", "zip": "1"},
    "card": {"number": "4", "year": 1},
    "phones": ["1"],
    "orders": [{"iban": "i", "sku": "s"}],
    "notes": [("k", "v")],
}
EXPECTED = {
    "id": None,
    "email": "pii",
    "address.street": "pii",
    "address.zip": "pii",
    "card.number": "pci",
    "card.year": None,
    "phones.list.element": "pii",
    "orders.list.element.iban": "pci",
    "orders.list.element.sku": None,
    "notes.key_value.key": None,
    "notes.key_value.value": "pii",
}


def nested_table() -> pa.Table:
    return pa.Table.from_pylist([ROW], schema=NESTED)


def test_labels_of_arrow_fields(make: Make, tmp_path: Path) -> None:
    tools = make({"arrow": {"field": "class"}}, unlabelled="public")
    table = nested_table()
    tools.write_table(table, tmp_path / "written.parquet")
    tools.write_dataset(table, tmp_path / "folder")
    pq.write_table(table, tmp_path / "plain.parquet")
    tools.encrypt_file(tmp_path / "plain.parquet", tmp_path / "encrypted.parquet")
    with tools.writer(tmp_path / "batches.parquet", table.schema) as writer:
        writer.write(table)
    pq.write_table(table, str(tmp_path / "through.parquet"), filesystem=tools.filesystem())
    tools.rekey_file(tmp_path / "written.parquet", tmp_path / "rekeyed.parquet")
    (in_folder,) = (tmp_path / "folder").glob("*.parquet")
    for name in ("written", "encrypted", "batches", "rekeyed", "through"):
        assert keys(tools, tmp_path / f"{name}.parquet") == EXPECTED, name
    assert keys(tools, in_folder) == EXPECTED
    assert tools.read_table(tmp_path / "written.parquet").equals(table)
    assert tools.verify_file(tmp_path / "encrypted.parquet").conforms


def test_a_plaintext_label_of_the_data_decides_nothing(make: Make, tmp_path: Path) -> None:
    schema = pa.schema([labelled("id", pa.int64(), "public")])
    with pytest.raises(ConfigurationError, match="'id'"):
        make({"arrow": {}}).write_table(pa.table({"id": [1]}, schema=schema), tmp_path / "x.parquet")
    # Nor does it remove a key.
    tools = make({"arrow": {}}, csv_source(tmp_path, id="pii"))
    tools.write_table(pa.table({"id": [1]}, schema=schema), tmp_path / "x.parquet")
    assert keys(tools, tmp_path / "x.parquet") == {"id": "pii"}
    tools = make({"arrow": {}}, column_keys={"other": ["id"]})
    tools.write_table(pa.table({"id": [1]}, schema=schema), tmp_path / "x.parquet")
    assert keys(tools, tmp_path / "x.parquet") == {"id": "other"}


@pytest.mark.parametrize("label", ["public", "payment"])
def test_labels_of_the_data_that_contradict_others(make: Make, tmp_path: Path, label: str) -> None:
    tools = make({"arrow": {}}, csv_source(tmp_path, id=label))
    schema = pa.schema([labelled("id", pa.int64(), "pii")])
    with pytest.raises(ConfigurationError, match=r"'pii' by the field 'id'|labels\.csv:2"):
        tools.write_table(pa.table({"id": [1]}, schema=schema), tmp_path / "x.parquet")


def test_a_label_of_the_data_chooses_another_class_than_unlabelled(make: Make, tmp_path: Path) -> None:
    schema = pa.schema([labelled("id", pa.int64(), None), labelled("card", pa.int64(), "payment")])
    table = pa.table({"id": [1], "card": [4]}, schema=schema)
    tools = make({"arrow": {}}, unlabelled="pii")
    tools.write_table(table, tmp_path / "x.parquet")
    assert keys(tools, tmp_path / "x.parquet") == {"id": "pii", "card": "pci"}
    assert tools.read_table(tmp_path / "x.parquet").equals(table)
    assert tools.verify_file(tmp_path / "x.parquet").conforms
    # A file of labels, column_keys or plaintext_columns take precedence, and plaintext is refused.
    for more in (
        {"column_keys": {"pii": ["card"]}},
        {"labels_from": [{"arrow": {}}, {"columns": {"card": "pii"}}]},
    ):
        with pytest.raises(KeytoolsError, match="card"):
            make({"arrow": {}}, **{"unlabelled": "pii", **more}).read_table(tmp_path / "x.parquet")
    make({"arrow": {}}, unlabelled="public").write_table(table, tmp_path / "y.parquet")
    with pytest.raises(KeytoolsError, match="id"):
        tools.read_table(tmp_path / "y.parquet")


def test_a_label_of_the_data_that_is_no_class(make: Make, tmp_path: Path) -> None:
    tools = make({"arrow": {}}, unlabelled="public")
    schema = pa.schema([labelled("id", pa.int64(), "pij")])
    with pytest.raises(ConfigurationError, match="Did you mean 'pii'"):
        tools.write_table(pa.table({"id": [1]}, schema=schema), tmp_path / "x.parquet")


def test_a_schema_in_a_file_that_cannot_be_read_hides_no_label(make: Make, tmp_path: Path) -> None:
    tools = make({"arrow": {}}, unlabelled="public")
    table = pa.table({"id": [1]})
    for key in ("ARROW:schema", "org.apache.spark.sql.parquet.row.metadata"):
        with pq.ParquetWriter(tmp_path / "plain.parquet", table.schema, store_schema=False) as writer:
            writer.write_table(table)
            writer.add_key_value_metadata({key: "no schema"})
        with pytest.raises(KeytoolsError, match="labels of columns"):
            tools.encrypt_file(tmp_path / "plain.parquet", tmp_path / "x.parquet")
        assert not (tmp_path / "x.parquet").exists()


def test_labels_of_spark_fields_in_a_file(make: Make, tmp_path: Path) -> None:
    element = {"type": "struct", "fields": [{"name": "iban", "type": "string", "metadata": {"class": "payment"}}]}
    fields = [
        {"name": "email", "type": "string", "nullable": True, "metadata": {"class": "pii"}},
        {"name": "orders", "type": {"type": "array", "elementType": element}, "nullable": True, "metadata": {}},
        {"name": "id", "type": "long", "nullable": True, "metadata": {}},
    ]
    table = pa.table({"email": ["a"], "orders": [[{"iban": "i"}]], "id": [1]})
    with pq.ParquetWriter(tmp_path / "plain.parquet", table.schema, store_schema=False) as writer:
        writer.write_table(table)
        text = json.dumps({"type": "struct", "fields": fields})
        writer.add_key_value_metadata({"org.apache.spark.sql.parquet.row.metadata": text})
    tools = make({"arrow": {}}, unlabelled="public")
    tools.encrypt_file(tmp_path / "plain.parquet", tmp_path / "x.parquet")
    assert keys(tools, tmp_path / "x.parquet") == {"email": "pii", "orders.list.element.iban": "pci", "id": None}


# --- other outputs that show values ---


def test_folders_with_values_of_labelled_columns_are_refused(make: Make, tmp_path: Path) -> None:
    tools = make(csv_source(tmp_path, id="public", email="pii", card="payment"))
    with pytest.raises(ConfigurationError, match="email"):
        tools.write_dataset(TABLE, tmp_path / "folder", partitioning=["email"], partitioning_flavor="hive")
    tools.write_dataset(TABLE, tmp_path / "folder", partitioning=["id"], partitioning_flavor="hive")
    tools.write_table(TABLE.drop_columns("id"), tmp_path / "x.parquet")
    (tmp_path / "Email=a").mkdir()
    (tmp_path / "x.parquet").rename(tmp_path / "Email=a" / "x.parquet")
    with pytest.raises(FolderNameError):
        tools.read_table(tmp_path / "Email=a" / "x.parquet")


def test_readers_of_digests_see_none_of_the_values(make: Make, tmp_path: Path) -> None:
    source = csv_source(tmp_path, id="public", email="pii", card="payment")
    make(source).write_table(TABLE, tmp_path / "x.parquet")
    more = {"hash_keys": {"h": {"master_key": "other", "wrapped_key": "x"}}, "reading": {"denied_columns": "hash"}}
    tools = make(source, hash_key="h", more=more)
    with pytest.raises(KeytoolsError):
        tools.read_table(tmp_path / "x.parquet", columns=["email"])


def test_a_file_with_a_plaintext_column_that_has_a_label_is_refused(make: Make, tmp_path: Path) -> None:
    document = csv_source(tmp_path, id="public", email="public", card="payment")
    make(document).write_table(TABLE, tmp_path / "x.parquet")
    tools = make(csv_source(tmp_path, id="public", email="pii", card="payment"))
    with pytest.raises(KeytoolsError, match="email"):
        tools.read_table(tmp_path / "x.parquet")
    assert not tools.verify_file(tmp_path / "x.parquet").conforms


# --- other processes ---


def test_other_processes_need_no_label_files(make: Make, tmp_path: Path) -> None:
    source = csv_source(tmp_path, id="public", email="pii", **{"${card": "payment"})
    configuration = make(source, more={"kms": {"type": "in_memory", "keys": list(MASTER_KEYS)}}).configuration
    pickled = pickle.dumps(configuration)
    (tmp_path / "labels.csv").unlink()
    there = pickle.loads(pickled)
    expected = configuration.tables["customers"].labels.labels
    assert there.tables["customers"].labels.labels == expected
    # And again.
    assert pickle.loads(pickle.dumps(there)).tables["customers"].labels.labels == expected


# --- dbt and data contracts ---


def manifest(columns: dict[str, Any], **node: Any) -> str:
    """The parts of a dbt 1.11 manifest that the parser needs."""
    base = {
        "database": "db", "schema": "main", "name": "customers", "resource_type": "model", "package_name": "shop",
        "path": "customers.sql", "original_file_path": "models/customers.sql", "unique_id": "model.shop.customers",
        "fqn": ["shop", "customers"], "alias": "customers", "checksum": {"name": "sha256", "checksum": "0"},
        "patch_path": "shop://models/schema.yml", "columns": columns, **node,
    }  # fmt: skip
    schema = "https://schemas.getdbt.com/dbt/manifest/v12.json"
    names = (
        "nodes sources macros docs exposures metrics groups selectors disabled parent_map child_map group_map "
        "saved_queries semantic_models unit_tests"
    )
    document: dict[str, Any] = {name: {} for name in names.split()}
    document |= {"metadata": {"dbt_schema_version": schema}, "nodes": {"model.shop.customers": base}}
    return json.dumps(document)


def test_labels_of_dbt(make: Make, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "schema.yml").write_text(
        "models:\n  - name: customers\n    columns:\n      - name: id\n      - name: email\n"
    )
    columns = {
        "id": {"name": "id", "tags": ["public", "daily"]},
        "email": {"name": "email", "meta": {"class": "pii"}},
        "card": {"name": "card", "config": {"meta": {"class": "payment"}, "tags": ["payment"]}},
    }
    (tmp_path / "target" / "manifest.json").write_text(manifest(columns))
    tools = make({"dbt": "target/manifest.json"})
    tools.write_table(TABLE, tmp_path / "x.parquet")
    assert keys(tools, tmp_path / "x.parquet") == {
        "id": None,
        "email": "pii",
        "card.number": "pci",
        "card.year": "pci",
    }
    places = {label.column: label.place for label in tools.configuration.tables["customers"].labels.labels}
    assert places["email"] == "models/schema.yml:5"
    assert places["card"] == "target/manifest.json (model.shop.customers)"
    columns["email"]["meta"] = {"class": "secret"}
    (tmp_path / "target" / "manifest.json").write_text(manifest(columns))
    with pytest.raises(ConfigurationError, match="'secret'"):
        make({"dbt": "target/manifest.json"})
    with pytest.raises(ConfigurationError, match="no models or sources with the name 'clients'"):
        make({"dbt": "target/manifest.json", "name": "clients"})


CONTRACT = """\
version: 1.0.0
apiVersion: v3.0.2
kind: DataContract
id: 53581432-6c55-4ba2-a65f-72344a91553b
status: active
schema:
  - name: customers
    logicalType: object
    properties:
      - name: id
        logicalType: integer
        classification: public
      - name: email
        logicalType: string
        tags: [pii, daily]
      - name: card
        logicalType: object
        properties:
          - {name: number, logicalType: string, classification: payment}
          - {name: year, logicalType: integer, classification: public}
"""


def test_labels_of_a_data_contract(make: Make, tmp_path: Path) -> None:
    (tmp_path / "customers.odcs.yaml").write_text(CONTRACT)
    tools = make({"contract": "customers.odcs.yaml"})
    tools.write_table(TABLE, tmp_path / "x.parquet")
    assert keys(tools, tmp_path / "x.parquet") == {
        "id": None,
        "email": "pii",
        "card.number": "pci",
        "card.year": None,
    }
    places = {label.column: label.place for label in tools.configuration.tables["customers"].labels.labels}
    assert places == {
        "id": "customers.odcs.yaml:10", "email": "customers.odcs.yaml:13",
        "card.number": "customers.odcs.yaml:19", "card.year": "customers.odcs.yaml:20",
    }  # fmt: skip
    (tmp_path / "customers.odcs.yaml").write_text(
        CONTRACT.replace("classification: payment", "classification: secret")
    )
    with pytest.raises(ConfigurationError, match=r"customers\.odcs\.yaml:19 has the label 'secret'"):
        make({"contract": "customers.odcs.yaml"})


def test_a_configuration_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("column,class\nemail,pii\n")
    (tmp_path / "keytools.yaml").write_text(
        "version: 1\nkms: {type: in_memory, keys: [footer, pii]}\nclasses: {pii: {key: pii}}\n"
        "tables:\n  t:\n    footer_key: footer\n    labels_from:\n      - csv: labels.csv\n"
    )
    (label,) = load_configuration(tmp_path / "keytools.yaml").tables["t"].labels.labels
    assert (label.column, label.class_name, label.place) == ("email", "pii", "labels.csv:2")


# --- spellings, and data that comes later ---

PEOPLE = pa.table(
    {"people": [[{"name": "n", "ssn": "1"}]], "m": pa.array([[("k", "v")]], pa.map_(pa.string(), pa.string()))}
)


def columns_source(**labels: str) -> dict[str, Any]:
    return {"columns": {column.replace("__", "."): name for column, name in labels.items()}}


@pytest.mark.parametrize("column", ["people.ssn", "people.list.element.ssn", "PEOPLE.list.element.SSN"])
def test_the_label_of_a_column_in_a_list_comes_before_its_parents(make: Make, tmp_path: Path, column: str) -> None:
    tools = make({"columns": {"people": "public", column: "pii", "m": "public", "m.value": "payment"}})
    tools.write_table(PEOPLE, tmp_path / "x.parquet")
    assert keys(tools, tmp_path / "x.parquet") == {
        "people.list.element.name": None, "people.list.element.ssn": "pii",
        "m.key_value.key": None, "m.key_value.value": "pci",
    }  # fmt: skip


def test_contradictions_are_found_in_any_spelling(make: Make) -> None:
    with pytest.raises(ConfigurationError, match="contradicting"):
        make(columns_source(people__ssn="pii"), {"columns": {"people.list.element.ssn": "public"}})


@pytest.mark.parametrize(("first", "second"), [("pii", "public"), ("public", "pii"), ("pii", "payment")])
def test_two_schemas_of_a_file_that_disagree(make: Make, tmp_path: Path, first: str, second: str) -> None:
    table = pa.table({"email": ["a"]}, schema=pa.schema([labelled("email", pa.string(), first)]))
    fields = [{"name": "email", "type": "string", "nullable": True, "metadata": {"class": second}}]
    with pq.ParquetWriter(tmp_path / "plain.parquet", table.schema) as writer:
        writer.write_table(table)
        text = json.dumps({"type": "struct", "fields": fields})
        writer.add_key_value_metadata({"org.apache.spark.sql.parquet.row.metadata": text})
    tools = make({"arrow": {}}, unlabelled="public")
    with pytest.raises(ConfigurationError, match="two labels"):
        tools.encrypt_file(tmp_path / "plain.parquet", tmp_path / "x.parquet")


def test_a_label_of_the_data_whose_column_has_another_name(make: Make, tmp_path: Path) -> None:
    schema = pa.schema([labelled("first name", pa.string(), "pii")])
    table = pa.table({"first name": ["a"]}, schema=schema)
    tools = make({"arrow": {}}, unlabelled="public")
    with pytest.raises(ConfigurationError, match="no column is named 'first name'"):
        tools.write_table(table, tmp_path / "x.parquet", flavor="spark")


def test_files_from_before_a_label_are_not_passed_over(make: Make, tmp_path: Path) -> None:
    table = pa.table({"email": ["a"]}, schema=pa.schema([labelled("email", pa.string(), "pii")]))
    pq.write_table(table, tmp_path / "plain.parquet")
    before = make(columns_source(email="public"))
    before.encrypt_file(tmp_path / "plain.parquet", tmp_path / "x.parquet")
    tools = make({"arrow": {}}, unlabelled="public")
    with pytest.raises(KeytoolsError, match="email"):
        tools.encrypt_in_place(tmp_path / "x.parquet")
    result = tools.encrypt_file(
        tmp_path / "plain.parquet", tmp_path / "x.parquet", skip_existing=True, overwrite=True
    )
    assert not result.skipped
    assert keys(tools, tmp_path / "x.parquet") == {"email": "pii"}


def test_later_data_of_a_writer_has_no_other_labels(make: Make, tmp_path: Path) -> None:
    tools = make({"arrow": {}}, unlabelled="public")
    plain = pa.table({"email": ["a"]})
    marked = plain.cast(pa.schema([labelled("email", pa.string(), "pii")]))
    with (
        pytest.raises(ConfigurationError, match="'pii'"),
        tools.writer(tmp_path / "x.parquet", plain.schema) as writer,
    ):
        writer.write_table(plain)
        writer.write_table(marked)
    assert not (tmp_path / "x.parquet").exists()
    with pytest.raises(ConfigurationError, match="'pii'"):
        tools.write_dataset([plain, marked], tmp_path / "folder")


def files_of_which_the_second_has_a_label(folder: Path) -> ds.Dataset:
    plain = pa.table({"email": ["a"], "n": [1]})
    marked = plain.cast(pa.schema([labelled("email", pa.string(), "pii"), plain.schema.field("n")]))
    pq.write_table(plain, folder / "0.parquet")
    pq.write_table(marked, folder / "1.parquet")
    return ds.dataset([str(folder / f"{n}.parquet") for n in range(2)])


def test_a_data_set_is_refused_if_its_schema_lacks_a_label_of_a_file(make: Make, tmp_path: Path) -> None:
    tools = make({"arrow": {}}, unlabelled="public")
    data = files_of_which_the_second_has_a_label(tmp_path)
    union = ds.dataset([data, ds.dataset(tmp_path / "0.parquet")])
    for what in (data, union, data.filter(ds.field("n") == 1)):
        with pytest.raises(ConfigurationError, match="label"):
            tools.write_table(what, tmp_path / "x.parquet")
        with pytest.raises(ConfigurationError, match="label"):
            tools.write_dataset(what, tmp_path / "folder")
        assert not (tmp_path / "x.parquet").exists()
        assert not list(tmp_path.glob("folder/*"))
    # A schema with the label protects the column, filtered or not; columns that are left out have no label.
    schema = pa.schema([labelled("email", pa.string(), "pii"), ("n", pa.int64())])
    complete = data.replace_schema(schema)
    for number, what in enumerate((complete, complete.scanner(filter=ds.field("n") == 1))):
        tools.write_table(what, tmp_path / f"x{number}.parquet")
        assert keys(tools, tmp_path / f"x{number}.parquet") == {"email": "pii", "n": None}
    tools.write_table(data.replace_schema(pa.schema([("n", pa.int64())])), tmp_path / "n.parquet")
    assert keys(tools, tmp_path / "n.parquet") == {"n": None}
    # Without `arrow`, labels of the data do not count.
    make(columns_source(email="public"), unlabelled="public").write_table(data, tmp_path / "y.parquet")


def test_encrypted_data_sets_are_refused_alike(make: Make, tmp_path: Path) -> None:
    files_of_which_the_second_has_a_label(tmp_path)
    (tmp_path / "encrypted").mkdir()
    for n in range(2):
        make({"arrow": {}}, unlabelled="pii").encrypt_file(
            tmp_path / f"{n}.parquet", tmp_path / "encrypted" / f"{n}.parquet"
        )
    tools = make({"arrow": {}}, unlabelled="public")
    reader = make({"arrow": {}}, unlabelled="pii")
    data = reader.dataset(tmp_path / "encrypted")
    for what in (data, data.filter(ds.field("n") == 1)):
        with pytest.raises(ConfigurationError, match="'pii'"):
            tools.write_table(what, tmp_path / "x.parquet")
    tools.write_table(data.replace_schema(pa.schema([("n", pa.int64())])), tmp_path / "n.parquet")
    assert keys(tools, tmp_path / "n.parquet") == {"n": None}


def test_labels_within_user_defined_and_run_end_encoded_types(make: Make, tmp_path: Path) -> None:
    point = {"type": "struct", "fields": [{"name": "x", "type": "double", "metadata": {"class": "pii"}}]}
    place = {"type": "udt", "class": "org.example.PointUDT", "sqlType": point}
    fields = [{"name": "place", "type": place, "nullable": True, "metadata": {}}]
    table = pa.table({"place": [{"x": 1.0}]})
    with pq.ParquetWriter(tmp_path / "plain.parquet", table.schema, store_schema=False) as writer:
        writer.write_table(table)
        text = json.dumps({"type": "struct", "fields": fields})
        writer.add_key_value_metadata({"org.apache.spark.sql.parquet.row.metadata": text})
    tools = make({"arrow": {}}, unlabelled="public")
    tools.encrypt_file(tmp_path / "plain.parquet", tmp_path / "x.parquet")
    assert keys(tools, tmp_path / "x.parquet") == {"place.x": "pii"}
    encoded = pa.run_end_encoded(pa.int32(), pa.struct([labelled("x", pa.string(), "pii")]))
    assert labels_of_schema(pa.schema([("r", encoded)]), "class") == {("r", "x"): "pii"}


def test_a_pattern_that_only_seems_to_cover_a_column(make: Make, tmp_path: Path) -> None:
    tools = make(columns_source(email="pii"), column_keys={"other": ["e*l"]}, unlabelled="payment")
    table = pa.table({"email": ["a"], "e*l": ["b"]})
    tools.write_table(table, tmp_path / "x.parquet")
    assert keys(tools, tmp_path / "x.parquet") == {"email": "pii", "e*l": "other"}


# --- mutants of a policy: each ends in an error, or in a protected column ---

KINDS = ["arrow", "dbt", "contract", "csv"]


def labels_by(kind: str, folder: Path, labels: dict[str, str], table: pa.Table) -> tuple[dict[str, Any], pa.Table]:
    """Return a source with labels of top-level columns and of children of `card`, and data to write."""
    if kind == "arrow":
        children = [
            labelled(f.name, f.type, labels.get(f"card.{f.name}")) for f in table.schema.field("card").type
        ]
        fields = [
            labelled(
                field.name, pa.struct(children) if field.name == "card" else field.type, labels.get(field.name)
            )
            for field in table.schema
        ]
        return {"arrow": {}}, table.cast(pa.schema(fields))
    name = f"labels-{len(list(folder.glob('labels-*')))}"
    if kind == "csv":
        (folder / name).write_text("".join(f"{one}\n" for one in ["column,class", *map(",".join, labels.items())]))
    elif kind == "dbt":
        columns = {column: {"name": column, "meta": {"class": label}} for column, label in labels.items()}
        (folder / name).write_text(manifest(columns))
    else:
        text = CONTRACT[: CONTRACT.index("      - name: id")]
        for column in dict.fromkeys(path.partition(".")[0] for path in labels):
            text += f"      - {{name: {column}, logicalType: object"
            text += f", classification: {labels[column]}" if column in labels else ""
            inner = [(path.partition(".")[2], label) for path, label in labels.items() if path != column]
            inner = [(path, label) for path, label in inner if f"{column}.{path}" in labels]
            properties = [f"{{name: {p}, logicalType: string, classification: {label}}}" for p, label in inner]
            text += f", properties: [{', '.join(properties)}]" if properties else ""
            text += "}\n"
        (folder / name).write_text(text)
    return {kind: name}, table


def outcome(tools: Callable[[], Keytools], table: pa.Table, path: Path) -> dict[str, str | None] | str:
    """Write, and return the key of each column, or the error."""
    try:
        opened = tools()
        opened.write_table(table, path)
    except ConfigurationError as error:
        assert not path.exists()
        return str(error)
    return keys(opened, path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_removed_label_is_an_error(make: Make, tmp_path: Path, kind: str) -> None:
    rest = columns_source(id="public")
    source, table = labels_by(kind, tmp_path, {"email": "pii", "card": "payment"}, TABLE)
    assert outcome(lambda: make(source, rest), table, tmp_path / "x.parquet") == BY_LABEL
    source, table = labels_by(kind, tmp_path, {"card": "payment"}, TABLE)
    assert "'email'" in outcome(lambda: make(source, rest), table, tmp_path / "y.parquet")


@pytest.mark.parametrize("unlabelled", ["error", "public"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_parents_label_protects_its_children(make: Make, tmp_path: Path, kind: str, unlabelled: str) -> None:
    rest = columns_source(id="public")
    for labels, year in (
        ({"email": "pii", "card": "payment"}, "pci"),
        ({"email": "pii", "card": "payment", "card.year": "pii"}, "pii"),
    ):
        source, table = labels_by(kind, tmp_path, labels, TABLE)
        path = tmp_path / f"{year}.parquet"
        found = outcome(lambda s=source: make(s, rest, unlabelled=unlabelled), table, path)
        assert found == {**BY_LABEL, "card.year": year}
    # A child in plaintext is an error, or protected by its parent.
    source, table = labels_by(kind, tmp_path, {"email": "pii", "card": "payment", "card.year": "public"}, TABLE)
    found = outcome(lambda: make(source, rest, unlabelled=unlabelled), table, tmp_path / "z.parquet")
    assert found == BY_LABEL or "'card.year' has contradicting labels" in found


@pytest.mark.parametrize("weaker", ["public", "payment"])
@pytest.mark.parametrize("other", KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_two_sources_that_disagree(make: Make, tmp_path: Path, kind: str, other: str, weaker: str) -> None:
    if kind == other == "arrow":
        return  # The data has one schema; see `test_two_schemas_of_a_file_that_disagree`.
    first, table = labels_by(kind, tmp_path, {"email": "pii"}, TABLE)
    second, table = labels_by(other, tmp_path, {"email": weaker}, table)
    rest = columns_source(id="public", card="public")
    found = outcome(lambda: make(first, second, rest, unlabelled="public"), table, tmp_path / "x.parquet")
    # A label of the data removes no key: with `arrow`, only another key is a contradiction.
    is_kept = other == "arrow" and weaker == "public" and isinstance(found, dict) and found["email"] == "pii"
    assert is_kept or "column 'email' has contradicting labels" in found


@pytest.mark.parametrize("unlabelled", ["error", "public"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_renamed_column(make: Make, tmp_path: Path, kind: str, unlabelled: str) -> None:
    rest = columns_source(id="public")
    source, table = labels_by(kind, tmp_path, {"email": "pii", "card": "payment"}, TABLE)
    renamed = table.rename_columns(["id", "mail", "card"])
    found = outcome(lambda: make(source, rest, unlabelled=unlabelled), renamed, tmp_path / "x.parquet")
    # Arrow keeps the label with the field.
    kept = {"mail" if column == "email" else column: key for column, key in BY_LABEL.items()}
    assert found == kept if kind == "arrow" else "mail" in found and isinstance(found, str)
