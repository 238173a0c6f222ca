"""Keys by template: each value of a placeholder has its own master key."""

import base64
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from parquet_keytools import Keytools
from parquet_keytools.cli import app
from parquet_keytools.config.loader import parse_configuration
from parquet_keytools.conformance.report import Verdict
from parquet_keytools.errors import (
    ConfigurationError,
    KeytoolsError,
    KmsError,
    TableMismatchError,
    UnsupportedByArrowError,
)
from parquet_keytools.kms.in_memory import InMemoryKms

DATA = pa.table({"tenant": ["acme", "bolt", "acme"], "email": ["a@x", "b@x", "c@x"], "day": [1, 2, 3]})
PLAIN = DATA.drop_columns(["tenant"])
TENANTS = ("acme", "bolt")
KEYS = {
    name: base64.b64encode(name.ljust(16).encode()).decode()
    for name in ("footer", *(f"prod/{tenant}" for tenant in TENANTS))
}


def configuration(source: str = "partition", *, keys: Any = KEYS, **table: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "kms": {"type": "in_memory", "keys": keys},
        "master_keys": {"tenant-{tenant}": "prod/{tenant}"},
        "tables": {
            "events": {
                "footer_key": "footer",
                "column_keys": {"tenant-{tenant}": ["email"]},
                "plaintext_columns": ["day", "tenant"] if source == "partition" else ["day"],
                "key_values": {"tenant": {"from": source, "pattern": "[a-z0-9-]{1,64}"}},
                **table,
            }
        },
    }


def make(source: str = "partition", **changes: Any) -> Keytools:
    return Keytools.from_mapping(configuration(source, **changes))


def only_file(folder: Path) -> Path:
    (found,) = folder.rglob("*.parquet")
    return found


@pytest.fixture
def data_set(tmp_path: Path) -> Path:
    # The folders' column is in no file.
    result = make_for_partitions().write_dataset(DATA, tmp_path / "events", partitioning=["tenant"])
    assert result.engine == "module encryptor"
    assert any("keys for each value" in reason for reason in result.reasons)
    return tmp_path / "events"


def make_for_partitions(**changes: Any) -> Keytools:
    return make(plaintext_columns=[], unlisted_columns="plaintext", **changes)


def test_each_partition_is_under_the_key_of_its_value(data_set: Path) -> None:
    keytools = make_for_partitions()
    assert keytools.read_table(data_set).num_rows == 3
    assert keytools.verify_folder(data_set).conforms
    without_bolt = {name: key for name, key in KEYS.items() if name != "prod/bolt"}
    erased = make_for_partitions(keys=without_bolt)
    assert erased.read_table(data_set / "tenant=acme")["email"].to_pylist() == ["a@x", "c@x"]
    with pytest.raises(KeytoolsError):
        erased.read_table(data_set / "tenant=bolt")


def test_a_file_system_writes_each_folder_under_its_key(tmp_path: Path) -> None:
    keytools = make_for_partitions()
    pq.write_to_dataset(DATA, str(tmp_path / "d"), partition_cols=["tenant"], filesystem=keytools.filesystem())
    assert keytools.read_table(tmp_path / "d").num_rows == 3
    only_acme = make_for_partitions(keys={name: key for name, key in KEYS.items() if name != "prod/bolt"})
    assert only_acme.read_table(tmp_path / "d" / "tenant=acme").num_rows == 2
    with pytest.raises(KeytoolsError):
        only_acme.read_table(tmp_path / "d" / "tenant=bolt")


def test_files_are_encrypted_in_place_under_the_key_of_their_folder(tmp_path: Path) -> None:
    pq.write_to_dataset(DATA, str(tmp_path / "d"), partition_cols=["tenant"])
    make_for_partitions().encrypt_in_place(tmp_path / "d")
    assert make_for_partitions().read_table(tmp_path / "d").num_rows == 3
    make_for_partitions().rekey_in_place(tmp_path / "d")
    assert make_for_partitions().read_table(tmp_path / "d").num_rows == 3


def test_pyarrow_cannot_use_templates() -> None:
    with pytest.raises(UnsupportedByArrowError, match="each value"):
        make_for_partitions().encryption_properties(None, PLAIN.schema, "tenant=acme/x.parquet")


def test_a_file_under_another_value_is_not_skipped(tmp_path: Path) -> None:
    keytools = make("argument")
    pq.write_table(PLAIN, tmp_path / "plain.parquet")
    keytools.encrypt_file(tmp_path / "plain.parquet", tmp_path / "out.parquet", key_values={"tenant": "acme"})
    with pytest.raises(ConfigurationError, match="skip"):
        keytools.encrypt_file(
            tmp_path / "plain.parquet", tmp_path / "out.parquet", skip_existing=True, key_values={"tenant": "bolt"}
        )


def test_a_file_of_another_value_is_refused(data_set: Path) -> None:
    moved = data_set / "tenant=bolt" / "moved.parquet"
    shutil.move(only_file(data_set / "tenant=acme"), moved)
    keytools = make_for_partitions()
    with pytest.raises(TableMismatchError, match="prod/bolt"):
        keytools.read_table(moved)
    with pytest.raises(TableMismatchError):
        keytools.read_table(data_set)
    assert keytools.verify_folder(data_set).verdict is Verdict.VIOLATED


@pytest.mark.parametrize(
    "folder",
    [
        "",
        "tenant=ACME",
        "tenant=acme%2Fbolt",
        "tenant=acme/tenant=bolt",
        "tenant=acme/Tenant=bolt",
        "tenant=%2561",
    ],
)
def test_a_path_without_one_allowed_value_is_refused(tmp_path: Path, folder: str) -> None:
    keytools = make_for_partitions()
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    with pytest.raises(ConfigurationError):
        keytools.write_table(PLAIN, tmp_path / folder / "data.parquet")
    assert not list(tmp_path.rglob("*.parquet"))
    (tmp_path / "tenant=bolt").mkdir(exist_ok=True)
    written = tmp_path / "tenant=bolt" / "data.parquet"
    keytools.write_table(PLAIN, written)
    moved = tmp_path / folder / "moved.parquet"
    written.rename(moved)
    with pytest.raises(TableMismatchError):
        keytools.read_table(moved)


def test_folders_may_be_percent_encoded(tmp_path: Path) -> None:
    keytools = make_for_partitions()
    (tmp_path / "tenant=%61cme").mkdir()
    keytools.write_table(PLAIN, tmp_path / "tenant=%61cme" / "data.parquet")
    (tmp_path / "tenant=acme").mkdir()
    (tmp_path / "tenant=%61cme" / "data.parquet").rename(tmp_path / "tenant=acme" / "data.parquet")
    assert keytools.read_table(tmp_path / "tenant=acme" / "data.parquet").num_rows == 3


def test_the_value_is_an_argument(tmp_path: Path) -> None:
    keytools = make("argument")
    for tenant in TENANTS:
        keytools.write_table(PLAIN, tmp_path / f"{tenant}.parquet", key_values={"tenant": tenant})
        with keytools.writer(
            tmp_path / f"{tenant}-w.parquet", PLAIN.schema, key_values={"tenant": tenant}
        ) as writer:
            writer.write_table(PLAIN)
        keytools.write_dataset(PLAIN, tmp_path / tenant, key_values={"tenant": tenant})
        pq.write_table(PLAIN, tmp_path.parent / "plain.parquet")
        keytools.encrypt_file(
            tmp_path.parent / "plain.parquet", tmp_path / f"{tenant}-e.parquet", key_values={"tenant": tenant}
        )
        keytools.rekey_file(
            tmp_path / f"{tenant}.parquet", tmp_path / f"{tenant}-r.parquet", key_values={"tenant": tenant}
        )
    # A reader of all tenants needs no list of them.
    assert keytools.read_table(tmp_path, filters=[("day", ">", 0)]).num_rows == 3 * 2 * 5
    without_bolt = make("argument", keys={name: key for name, key in KEYS.items() if name != "prod/bolt"})
    for path in tmp_path.rglob("*.parquet"):
        if "bolt" in str(path.relative_to(tmp_path)):
            with pytest.raises(KeytoolsError):
                without_bolt.read_table(path)
        else:
            assert without_bolt.read_table(path).num_rows == 3


@pytest.mark.parametrize("value", ["", "ACME", "acme/bolt", "acme%", "acme\n", "{tenant}", "x" * 65])
def test_the_pattern_refuses_values(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigurationError, match="refuses"):
        make("argument").write_table(PLAIN, tmp_path / "data.parquet", key_values={"tenant": value})
    assert not list(tmp_path.iterdir())


def test_the_folder_of_null_is_no_value(tmp_path: Path) -> None:
    any_value = {"key_values": {"tenant": {"from": "partition", "pattern": ".+"}}}
    data = pa.table({"tenant": ["acme", None], "email": ["a@x", "b@x"], "day": [1, 2]})
    with pytest.raises(ConfigurationError, match="refuses the value '__HIVE_DEFAULT_PARTITION__'"):
        make_for_partitions(**any_value).write_dataset(data, tmp_path / "d", partitioning=["tenant"])


@pytest.mark.parametrize("key_values", [None, {}, {"tenat": "acme"}])
def test_a_missing_value_is_refused(tmp_path: Path, key_values: dict[str, str] | None) -> None:
    with pytest.raises(ConfigurationError, match="tenant"):
        make("argument").write_table(PLAIN, tmp_path / "data.parquet", key_values=key_values)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("source", ["partition", "argument"])
def test_path_and_argument_must_agree(tmp_path: Path, source: str) -> None:
    keytools = make_for_partitions() if source == "partition" else make("argument", plaintext_columns=["day"])
    (tmp_path / "tenant=acme").mkdir()
    path = tmp_path / "tenant=acme" / "data.parquet"
    with pytest.raises(ConfigurationError, match="differ"):
        keytools.write_table(PLAIN, path, key_values={"tenant": "bolt"})
    assert not list(path.parent.iterdir())


def test_a_missing_master_key_is_never_created(tmp_path: Path) -> None:
    with pytest.raises(KmsError):
        make("argument").write_table(PLAIN, tmp_path / "data.parquet", key_values={"tenant": "new"})
    assert not list(tmp_path.iterdir())


def test_columns_of_one_file_are_under_one_value(tmp_path: Path) -> None:
    """A file whose columns are under the keys of two values was not written by this table."""
    fixed = {
        "footer_key": "footer",
        "column_keys": {"prod/acme": ["email"], "prod/bolt": ["day"]},
    }
    other = Keytools.from_mapping(
        {"version": 1, "kms": {"type": "in_memory", "keys": KEYS}, "tables": {"events": fixed}}
    )
    other.write_table(PLAIN, tmp_path / "data.parquet")
    table = {"column_keys": {"tenant-{tenant}": ["email", "day"]}, "plaintext_columns": []}
    with pytest.raises(TableMismatchError):
        make("argument", **table).read_table(tmp_path / "data.parquet")


def test_a_value_must_not_name_another_key(tmp_path: Path) -> None:
    mapping = configuration("argument", column_keys={"{tenant}": ["email"]})
    mapping["master_keys"] = {}
    keytools = Keytools.from_mapping(mapping)
    with pytest.raises(ConfigurationError, match="another key"):
        keytools.write_table(PLAIN, tmp_path / "data.parquet", key_values={"tenant": "footer"})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_values": {}}, "key_values does not say"),
        ({"key_values": {"tenant": {"from": "partition", "pattern": "["}}}, "regular expression"),
        ({"key_values": {"tenant": {"from": "partition", "pattern": "a*"}}}, "empty value"),
        ({"key_values": {"tenant": {"from": "guess", "pattern": "a"}}}, "from"),
        ({"key_values": {"tenant": {"from": "partition"}}}, "pattern"),
        ({"column_keys": {"a": ["email"]}}, "placeholder"),
        ({"column_keys": {"{tenant}-{tenant}": ["email"]}}, "at most one"),
        ({"column_keys": {"tenant-{tennant}": ["email"]}}, "does not say"),
    ],
)
def test_mistakes_are_reported_when_the_configuration_is_loaded(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make("argument", **change)


def test_the_identifier_needs_the_placeholder() -> None:
    mapping = configuration()
    mapping["master_keys"] = {"tenant-{tenant}": "prod/all"}
    with pytest.raises(ConfigurationError, match="its identifier"):
        Keytools.from_mapping(mapping)


def test_encrypt_takes_the_value_as_an_option(tmp_path: Path) -> None:
    import yaml

    (tmp_path / "c.yaml").write_text(yaml.safe_dump(configuration("argument")))
    pq.write_table(PLAIN, tmp_path / "plain.parquet")
    command = ["encrypt", str(tmp_path / "plain.parquet"), str(tmp_path / "out.parquet")]
    config = ["--config", str(tmp_path / "c.yaml")]
    result = CliRunner().invoke(app, [*command, *config])
    assert result.exit_code == 2
    assert not (tmp_path / "out.parquet").exists()
    result = CliRunner().invoke(app, [*command, *config, "--set", "tenant=acme"])
    assert result.exit_code == 0, result.output
    without_bolt = make("argument", keys={name: key for name, key in KEYS.items() if name != "prod/bolt"})
    assert without_bolt.read_table(tmp_path / "out.parquet").equals(PLAIN)
    result = CliRunner().invoke(app, ["keys", str(tmp_path / "out.parquet"), *config])
    assert "prod/acme" in result.output


def test_one_tenant_is_rotated(tmp_path: Path) -> None:
    keytools = make("argument")
    for tenant in TENANTS:
        keytools.write_table(PLAIN, tmp_path / f"{tenant}.parquet", key_values={"tenant": tenant})
    acme = (tmp_path / "acme.parquet").read_bytes()
    before = (tmp_path / "bolt.parquet").read_bytes()
    keytools.rotate(tmp_path, only_master_keys=["prod/acme"], new_keks=True)
    assert (tmp_path / "acme.parquet").read_bytes() != acme
    assert (tmp_path / "bolt.parquet").read_bytes() == before
    assert keytools.read_table(tmp_path).num_rows == 6


class CountingKms(InMemoryKms):
    """Counts the keys that it wraps and unwraps."""

    calls = 0

    def wrap_many(self, requests: Any) -> Any:
        self.calls += len(requests)
        return super().wrap_many(requests)

    def unwrap_many(self, requests: Any) -> Any:
        self.calls += len(requests)
        return super().unwrap_many(requests)


def test_each_tenant_takes_one_call(tmp_path: Path) -> None:
    tenants = [f"t{position}" for position in range(20)]
    kms = CountingKms({"footer": None, **{f"prod/{tenant}": None for tenant in tenants}})
    mapping = configuration(plaintext_columns=[], unlisted_columns="plaintext")
    keytools = Keytools(parse_configuration(mapping), kms=kms)
    data = pa.table({"tenant": tenants, "email": tenants, "day": list(range(20))})
    for part in range(3):
        keytools.write_dataset(
            data,
            tmp_path / "d",
            partitioning=["tenant"],
            basename_template=f"{part}-{{i}}.parquet",
            existing_data_behavior="overwrite_or_ignore",
        )
    assert kms.calls == 20 + 1
    keytools.clear_caches()
    assert keytools.read_table(tmp_path / "d").num_rows == 60
    assert kms.calls == 2 * (20 + 1)


# --- from a column ---

ONE = DATA.filter(pc.field("tenant") == "acme")
TWO = DATA


def of_column(*, keys: Any = KEYS, under: str = "plaintext", **table: Any) -> Keytools:
    """A table whose value column is in plaintext, under the footer key, or under the tenant's own key."""
    column_keys = {"tenant-{tenant}": ["email", "tenant"] if under == "own" else ["email"]}
    plaintext = ["day", "tenant"] if under == "plaintext" else ["day"]
    if under == "footer":
        column_keys |= {"footer": ["tenant"]}
    return make("column", keys=keys, **{"column_keys": column_keys, "plaintext_columns": plaintext, **table})


WITHOUT_BOLT = {name: key for name, key in KEYS.items() if name != "prod/bolt"}
PLACES = [
    {"under": under, "plaintext_footer": plaintext_footer}
    for under in ("plaintext", "footer", "own")
    for plaintext_footer in (False, True)
]


def ways_to_write(keytools: Keytools, data: pa.Table, folder: Path) -> dict[str, Callable[[], Any]]:
    """Return each way to write a file of a table, by name."""
    plain = folder.parent / f"plain-{folder.name}.parquet"
    pq.write_table(data, plain, row_group_size=1)

    def in_place() -> None:
        shutil.copy(plain, folder / "i.parquet")
        try:
            keytools.encrypt_in_place(folder / "i.parquet")
        except KeytoolsError:
            assert pq.read_table(folder / "i.parquet").equals(data)
            (folder / "i.parquet").unlink()
            raise

    def by_writer() -> None:
        with keytools.writer(folder / "w.parquet", data.schema) as writer:
            writer.write_table(data.slice(0, 0))
            for start in range(data.num_rows):
                writer.write_table(data.slice(start, 1))

    return {
        "write_table": lambda: keytools.write_table(data, folder / "t.parquet"),
        "row groups": lambda: keytools.write_table(data, folder / "r.parquet", row_group_size=1),
        "writer": by_writer,
        "write_dataset": lambda: keytools.write_dataset(data, folder / "d"),
        "filesystem": lambda: pq.write_table(data, str(folder / "f.parquet"), filesystem=keytools.filesystem()),
        "encrypt_file": lambda: keytools.encrypt_file(plain, folder / "e.parquet"),
        "encrypt_in_place": in_place,
    }


@pytest.mark.parametrize("place", PLACES)
def test_the_value_is_in_a_column(tmp_path: Path, place: dict[str, Any]) -> None:
    keytools = of_column(**place)
    folder = tmp_path / "events"
    folder.mkdir()
    for write in ways_to_write(keytools, ONE, folder).values():
        write()
    keytools.rekey_file(folder / "t.parquet", folder / "k.parquet")
    keytools.rekey_in_place(folder / "w.parquet")
    files = list(folder.rglob("*.parquet"))
    assert len(files) == 8
    only_acme = of_column(keys=WITHOUT_BOLT, **place)
    for file in files:
        assert only_acme.read_table(file, filters=[("day", ">", 0)]).num_rows == 2
    assert keytools.verify_folder(folder).conforms


BAD = {
    "two": TWO,
    "null": pa.table({"tenant": ["acme", None], "email": ["a", "b"], "day": [1, 2]}),
    "only null": pa.table({"tenant": pa.array([None], pa.string()), "email": ["a"], "day": [1]}),
    "refused": pa.table({"tenant": ["ACME"], "email": ["a"], "day": [1]}),
    "no rows": ONE.slice(0, 0),
    "no column": ONE.drop_columns(["tenant"]),
    "a float": pa.table({"tenant": [1.0], "email": ["a"], "day": [1]}),
    "a list": pa.table({"tenant": [["acme"]], "email": ["a"], "day": [1]}),
    "long": pa.table({"tenant": ["x" * 65], "email": ["a"], "day": [1]}),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_without_one_value_is_not_written(tmp_path: Path, name: str) -> None:
    keytools = of_column()
    folder = tmp_path / "events"
    folder.mkdir()
    # pyarrow's writer makes no file for an empty data set.
    for way, write in ways_to_write(keytools, BAD[name], folder).items():
        if (name, way) == ("no rows", "write_dataset"):
            continue
        with pytest.raises((ConfigurationError, pa.ArrowInvalid)) as caught:
            write()
        assert "tenant" in str(caught.value), way
        assert not [path for path in folder.rglob("*") if path.is_file()], way


def test_the_error_says_how_to_split(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="rows of each value"):
        of_column().write_table(TWO, tmp_path / "x.parquet")


def test_a_column_without_statistics_gives_no_value(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="statistics"):
        of_column().write_table(ONE, tmp_path / "x.parquet", write_statistics=["day"])
    assert not list(tmp_path.iterdir())


def test_values_of_column_path_and_argument_must_agree(tmp_path: Path) -> None:
    (tmp_path / "tenant=bolt").mkdir()
    for path, key_values in [(tmp_path / "x.parquet", "bolt"), (tmp_path / "tenant=bolt" / "x.parquet", "acme")]:
        with pytest.raises(ConfigurationError, match="differ"):
            of_column().write_table(ONE, path, key_values={"tenant": key_values})
        assert not path.exists()
    of_column().write_table(ONE.slice(0, 0), tmp_path / "empty.parquet", key_values={"tenant": "acme"})
    assert of_column().read_table(tmp_path / "empty.parquet").num_rows == 0


@pytest.mark.parametrize(
    "kind", [pa.int64(), pa.int32(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())]
)
def test_values_may_be_integers(tmp_path: Path, kind: pa.DataType) -> None:
    values = pa.array([4711, 4711], pa.int64()).cast(pa.int32() if kind == pa.int32() else pa.int64())
    if not pa.types.is_integer(kind):
        values = values.cast(pa.string()).cast(kind)
    data = pa.table({"tenant": values, "email": ["a", "b"], "day": [1, 2]})
    keytools = of_column(keys={**KEYS, "prod/4711": KEYS["footer"]})
    keytools.write_table(data, tmp_path / "x.parquet")
    assert keytools.read_table(tmp_path / "x.parquet")["tenant"].cast(pa.string()).to_pylist() == ["4711"] * 2


@pytest.mark.parametrize("place", PLACES)
def test_a_file_whose_column_has_the_value_of_another_tenant_is_refused(
    tmp_path: Path, place: dict[str, Any]
) -> None:
    # A writer with the same keys, and another value.
    table = {"column_keys": {"tenant-{tenant}": ["email"]}, "plaintext_columns": ["day", "tenant"]}
    if place["under"] == "own":
        table = {"column_keys": {"tenant-{tenant}": ["email", "tenant"]}, "plaintext_columns": ["day"]}
    if place["under"] == "footer":
        table = {"column_keys": {"tenant-{tenant}": ["email"], "footer": ["tenant"]}, "plaintext_columns": ["day"]}
    other = make("argument", plaintext_footer=place["plaintext_footer"], **table)
    keytools = of_column(**place)
    for name, data in [("two", TWO), ("another", ONE)]:
        path = tmp_path / f"{name}.parquet"
        other.write_table(data, path, key_values={"tenant": "bolt"})
        for read in (
            lambda path=path: keytools.read_table(path),
            lambda path=path: keytools.dataset(path).to_table(),
            lambda path=path: keytools.open(path).read(),
            lambda path=path: keytools.rekey_file(path, tmp_path / "rekeyed.parquet"),
            lambda path=path: keytools.decrypt_file(path, tmp_path / "decrypted.parquet"),
            lambda path=path: keytools.read_table(path, columns=["tenant"]),
        ):
            with pytest.raises(TableMismatchError, match="tenant"):
                read()
        report = keytools.verify_file(path)
        assert report.verdict is Verdict.VIOLATED
        assert "wanted-keys" in str(report.summary()["broken"])
    if place["under"] == "plaintext":
        # The value is known without the tenant's key.
        with pytest.raises(TableMismatchError):
            of_column(keys=WITHOUT_BOLT, **place).read_table(tmp_path / "two.parquet", columns=["day"])


# --- in place, with values from the caller ---


def test_files_are_encrypted_in_place_for_a_value(tmp_path: Path) -> None:
    keytools = make("argument")
    pq.write_table(PLAIN, tmp_path / "x.parquet")
    with pytest.raises(ConfigurationError, match="--set"):
        keytools.encrypt_in_place(tmp_path / "x.parquet")
    assert pq.read_table(tmp_path / "x.parquet").equals(PLAIN)
    for _ in range(2):
        keytools.encrypt_in_place(tmp_path / "x.parquet", key_values={"tenant": "acme"})
    written = (tmp_path / "x.parquet").read_bytes()
    only_acme = make("argument", keys=WITHOUT_BOLT)
    assert only_acme.read_table(tmp_path / "x.parquet").equals(PLAIN)
    # It does not count as done under another value.
    with pytest.raises(ConfigurationError, match="given values"):
        keytools.encrypt_in_place(tmp_path / "x.parquet", key_values={"tenant": "bolt"})
    assert (tmp_path / "x.parquet").read_bytes() == written
    keytools.rekey_in_place(tmp_path / "x.parquet", key_values={"tenant": "bolt"})
    with pytest.raises(KeytoolsError):
        only_acme.read_table(tmp_path / "x.parquet")
    assert keytools.read_table(tmp_path / "x.parquet").equals(PLAIN)


def test_commands_in_place_take_the_value_as_an_option(tmp_path: Path) -> None:
    import yaml

    (tmp_path / "c.yaml").write_text(yaml.safe_dump(configuration("argument")))
    (tmp_path / "d").mkdir()
    for name in "ab":
        pq.write_table(PLAIN, tmp_path / "d" / f"{name}.parquet")

    def run(*arguments: str, status: int = 0) -> str:
        result = CliRunner().invoke(app, [*arguments, "--config", str(tmp_path / "c.yaml")])
        assert result.exit_code == status, result.output
        return result.output

    run("encrypt", f"{tmp_path}/d", "--in-place", status=1)
    run("encrypt", f"{tmp_path}/d", "--in-place", "--set", "tenant=acme", "--processes", "2")
    assert "prod/acme" in run("keys", f"{tmp_path}/d")
    run("rekey", f"{tmp_path}/d", "--in-place", "--set", "tenant=bolt")
    shown = run("keys", f"{tmp_path}/d")
    assert "prod/bolt" in shown and "prod/acme" not in shown
    run("rekey", f"{tmp_path}/d", "--in-place", "--set", "tenat=bolt", status=1)
