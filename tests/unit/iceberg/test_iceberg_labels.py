"""Labels of columns of Iceberg tables: which key the table may be under."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from iceberg_case import Lake, rows
from pyiceberg.schema import Schema
from pyiceberg.types import ListType, LongType, NestedField, StringType, StructType

from parquet_keytools import Keytools, load_configuration
from parquet_keytools.errors import ConfigurationError
from parquet_keytools.iceberg import create_table
from parquet_keytools.iceberg.encrypted_table import EncryptedTable

POLICY = """\
classes: {{pii: {{key: pii}}, payment: {{key: pci}}, public: plaintext}}
tables:
  people:
    footer_key: pii
    unlabelled: {unlabelled}
    labels_from:
    - iceberg: {{{iceberg}}}
{more}
"""


class LabelledLake(Lake):
    """A lake whose configuration has a table with labels."""

    def policy(self, *, iceberg: str = "", unlabelled: str = "error", more: str = "", also: str = "") -> None:
        self.configure()
        path = self.folder / "keytools.yaml"
        text = path.read_text().replace("{pii: keyA}", "{pii: keyA, pci: keyB}")
        path.write_text(text + POLICY.format(iceberg=iceberg, unlabelled=unlabelled, more=more) + also)

    def make(
        self, key: str = "pii", schema: Schema | pa.Schema | None = None, **properties: str
    ) -> EncryptedTable:
        found = schema or schema_of(id="[class: public]", name="Full name. [class: pii]")
        return create_table(self.catalog(), "db.people", found, encryption_key=key, properties=properties)


def schema_of(**docs: str | None) -> Schema:
    kinds = {"id": LongType()}
    return Schema(
        *(
            NestedField(n, name, kinds.get(name, StringType()), required=False, doc=doc)
            for n, (name, doc) in enumerate(docs.items(), 1)
        )
    )


@pytest.fixture
def lake(tmp_path: Path) -> LabelledLake:
    found = LabelledLake(tmp_path)
    found.policy(unlabelled="public")
    return found


def test_a_table_is_under_the_key_of_its_labels(lake: LabelledLake) -> None:
    table = lake.make()
    table.append(rows(0, 5))
    table.overwrite(rows(1, 3), "id = 1")
    assert len(lake.load().scan().to_arrow()) == 6
    lake.assert_no_plaintext()


@pytest.mark.parametrize(
    ("docs", "properties"),
    [
        ({"name": "[class: payment]"}, {}),
        ({"name": "[ CLASS:payment ]"}, {}),
        ({"name": None}, {"class.name": "payment"}),
    ],
)
def test_a_table_under_another_key_is_not_created(
    lake: LabelledLake, docs: dict[str, str | None], properties: dict[str, str]
) -> None:
    with pytest.raises(ConfigurationError, match=r"db\.people.*'keyA'.*'name'.*'payment' by the field.*'pci'"):
        lake.make(schema=schema_of(id=None, **docs), **properties)
    assert not lake.catalog().table_exists("db.people")
    lake.make("pci", schema=schema_of(id=None, **docs), **properties).append(rows(0, 2))


def test_labels_of_nested_fields_and_of_parents(lake: LabelledLake) -> None:
    inner = StructType(
        NestedField(3, "iban", StringType(), required=False, doc="[class: payment]"),
        NestedField(4, "sku", StringType(), required=False),
    )
    orders = ListType(2, inner, element_required=False)
    for schema in (
        Schema(NestedField(1, "orders", orders, required=False)),
        Schema(
            NestedField(
                1, "card", StructType(NestedField(2, "no", LongType(), required=False)), doc="[class: payment]"
            )
        ),
    ):
        with pytest.raises(ConfigurationError, match=r"orders\.list\.element\.iban|card\.no"):
            lake.make(schema=schema)
    arrow = pa.schema([pa.field("iban", pa.string(), metadata={"doc": "[class: payment]"})])
    with pytest.raises(ConfigurationError, match="iban"):
        lake.make(schema=arrow)


def test_a_column_without_a_label_is_refused_when_it_is_added(lake: LabelledLake) -> None:
    lake.policy()
    # A label that needs no key does not affect the table.
    with pytest.raises(ConfigurationError, match=r"unlabelled.*'id'"):
        lake.make()
    lake.policy(more="    plaintext_columns: [id]")
    table = lake.make()
    with pytest.raises(ConfigurationError, match=r"unlabelled.*'iban'"), table.update_schema() as update:
        update.add_column("iban", StringType())
    assert lake.load().schema().column_names == ["id", "name"]
    with table.update_schema() as update:
        update.add_column("iban", StringType(), doc="IBAN [class: pii]")
    with pytest.raises(ConfigurationError, match="'pci'"), table.update_schema() as update:
        update.add_column("card", StringType(), doc="[class: payment]")
    assert lake.load().schema().column_names == ["id", "name", "iban"]


def test_rows_are_refused_once_a_label_wants_another_key(lake: LabelledLake) -> None:
    table = lake.make()
    table.append(rows(0, 2))
    before = lake.files()
    lake.policy(unlabelled="public", more="    - columns: {name: payment}")
    table = lake.load()
    for change in (lambda: table.append(rows(2, 4)), lambda: table.overwrite(rows(2, 4))):
        with pytest.raises(ConfigurationError, match="contradicting labels"):
            change()
    lake.policy(unlabelled="public", more="    - columns: {id: payment}")
    table = lake.load()
    with pytest.raises(ConfigurationError, match="'id' has the label 'payment'"):
        table.append(rows(2, 4))
    assert lake.files() == before
    # Existing data is read, and its keys are rotated.
    assert lake.ids() == [0, 1]
    assert table.rotate()


def test_labels_of_a_table_change_only_with_its_key(lake: LabelledLake) -> None:
    table = lake.make(schema=schema_of(id=None, name="[class: pii]"))
    with pytest.raises(ConfigurationError, match="'id' has the label 'payment'"), table.transaction() as change:
        change.set_properties({"class.id": "payment"})
    with pytest.raises(ConfigurationError, match="two labels"), table.transaction() as change:
        change.set_properties({"class.name": "payment"})
    assert "class.name" not in lake.load().properties


def test_one_key_for_columns_of_several_classes(lake: LabelledLake) -> None:
    schema = schema_of(id="[class: payment]", name="[class: pii]")
    for key in ("pii", "pci"):
        with pytest.raises(ConfigurationError, match="`keys` of `iceberg:`"):
            lake.make(key, schema=schema)
    lake.policy(iceberg="keys: [pci]")
    with pytest.raises(ConfigurationError, match="'id' has the label 'payment'"):
        lake.make("pii", schema=schema)
    lake.make("pci", schema=schema).append(rows(0, 2))
    # A key that only this table names is trusted, too.
    lake.policy(iceberg="keys: [master-1]")
    lake.catalog().drop_table("db.people")
    lake.make("master-1", schema=schema).append(rows(0, 2))
    with pytest.raises(ConfigurationError, match=r"labels_from.*'pic'"):
        lake.policy(iceberg="keys: [pic]")
        Keytools.from_yaml(lake.folder / "keytools.yaml")


def test_column_keys_override_labels_of_the_table(lake: LabelledLake) -> None:
    lake.policy(more="    column_keys: {pii: [id]}")
    lake.make(schema=schema_of(id="[class: payment]", name="[class: pii]"))


def test_a_label_of_a_table_never_takes_a_key_away(lake: LabelledLake) -> None:
    lake.policy(more="    - columns: {id: public, name: payment}")
    with pytest.raises(ConfigurationError, match="'name' has the label 'payment'"):
        lake.make(schema=schema_of(id=None, name="[class: public]"))


@pytest.mark.parametrize(
    ("docs", "properties", "message"),
    [
        ({"name": "[class: secret]"}, {}, "'secret'"),
        ({"name": "[class: pii] [class: payment]"}, {}, "two labels"),
        ({"name": "[class: pii]"}, {"class.name": "payment"}, "two labels"),
        ({"name": "[class: pii]"}, {"class.full_name": "pii"}, "no column 'full_name'"),
    ],
)
def test_mistakes_in_labels_of_a_table(
    lake: LabelledLake, docs: dict[str, str | None], properties: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        lake.make(schema=schema_of(id=None, **docs), **properties)


def test_a_renamed_column_keeps_its_doc_and_loses_its_property(lake: LabelledLake) -> None:
    table = lake.make(**{"class.name": "pii"})
    with pytest.raises(ConfigurationError, match="no column 'name'"), table.update_schema() as update:
        update.rename_column("name", "full_name")
    with table.transaction() as change:
        with change.update_schema() as update:
            update.rename_column("name", "full_name")
        change.remove_properties("class.name")
        change.set_properties({"class.full_name": "pii"})
    assert "full_name" in lake.load().schema().column_names


@pytest.mark.parametrize(
    ("name", "is_named"), [("people", True), ("db.people", True), ("DB.People", True), ("other.people", False)]
)
def test_which_table_an_entry_means(lake: LabelledLake, name: str, is_named: bool) -> None:
    path = lake.folder / "keytools.yaml"
    path.write_text(path.read_text().replace("- iceberg: {}", f"- {{iceberg: {{}}, name: {name}}}"))
    schema = schema_of(id=None, name="[class: payment]")
    if is_named:
        with pytest.raises(ConfigurationError, match="'payment'"):
            lake.make(schema=schema)
    else:
        lake.make(schema=schema)


def test_other_processes_have_the_entry(lake: LabelledLake) -> None:
    (lake.folder / "labels.csv").write_text("column,class\nid,public\n")
    lake.policy(iceberg="field: kind", more="    - csv: labels.csv")
    configuration = load_configuration(lake.folder / "keytools.yaml")
    labels = configuration.tables["people"].labels
    assert labels.iceberg is not None and labels.iceberg.iceberg is not None
    assert labels.iceberg.iceberg.field == "kind"
    with pytest.raises(ConfigurationError, match="twice"):
        lake.policy(more="    - iceberg: {}")
        load_configuration(lake.folder / "keytools.yaml")
