"""Unchecked parts never pass; damaged parts are named; intact parts are salvaged."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs as pafs
from pyarrow_versions import WRITES_BLOOM_FILTERS, bloom_filters
from vector_kit.vector import FOOTER_KEY, SealedFile, recipe

from parquet_keytools import Keytools
from parquet_keytools.conformance.report import RULES, Damage, DataSetReport, FileReport, Loss, Outcome, Verdict
from parquet_keytools.conformance.verification import MemberVerifier, verify_file, verify_folder
from parquet_keytools.encryption.aad import ModuleType
from parquet_keytools.errors import (
    ColumnAccessDeniedError,
    DecryptionError,
    FooterSignatureError,
    NoParquetFilesError,
    NotEncryptedError,
    OutputError,
    ParquetFormatError,
    TableMismatchError,
)
from parquet_keytools.format.structs import PageHeader
from parquet_keytools.storage.locations import FileLocation, open_source

MASTER_KEYS = {name: base64.b64encode((name[:1] * 16).encode()).decode() for name in ("footer", "pii", "other")}
ROWS = 90
TABLE = pa.table(
    {
        "id": pa.array(range(ROWS), pa.int64()),
        "name": [f"name {number % 4}" for number in range(ROWS)],
        "price": [number / 4 for number in range(ROWS)],
    }
)
POLICY: dict[str, Any] = {
    "footer_key": "footer",
    "column_keys": {"pii": ["name"]},
    "unlisted_columns": "footer_key",
    "aad_prefix": "shop/{file_name}",
}


def keytools(**changes: Any) -> Keytools:
    kms = {"type": "in_memory", "keys": MASTER_KEYS}
    return Keytools.from_mapping({"version": 1, "kms": kms, "tables": {"shop": POLICY | changes}})


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """Writes an encrypted file of three row groups of three pages."""

    def write(
        name: str = "file.parquet", *, table: pa.Table = TABLE, compression: str = "snappy", **changes: Any
    ) -> Path:
        plain = tmp_path / f"{name}.plain"
        pq.write_table(
            table,
            plain,
            row_group_size=30,
            data_page_size=1,
            write_batch_size=10,
            use_dictionary=["name"],
            compression=compression,
            write_page_index=True,
            **bloom_filters({"name": {"ndv": 4, "fpp": 0.1}}),
        )
        path = tmp_path / "set" / name
        path.parent.mkdir(exist_ok=True)
        keytools(**changes).encrypt_file(plain, path)
        plain.unlink()
        return path

    return write


def reading_plaintext_too(**changes: Any) -> Keytools:
    kms = {"type": "in_memory", "keys": MASTER_KEYS}
    reading = {"plaintext_files": "allow"}
    return Keytools.from_mapping(
        {"version": 1, "kms": kms, "reading": reading, "tables": {"shop": POLICY | changes}}
    )


def data_set_rules(report: DataSetReport) -> set[str]:
    return {result.rule.id for result in report.rules if result.outcome is Outcome.BROKEN}


def broken(report: FileReport) -> set[str]:
    return {result.rule.id for result in report.rules if result.outcome is Outcome.BROKEN}


def flip(path: Path, module_type: ModuleType, row_group: int, column: int, page: int | None = None) -> None:
    """Flip a bit in the middle of a module."""
    with keytools() as reader:
        shown = reader.inspect_file(path)
    module = next(
        module
        for chunk in shown.chunks
        if (chunk.row_group_ordinal, chunk.column_ordinal) == (row_group, column)
        for module in chunk.modules
        if module.module_type is module_type and module.page_ordinal == page
    )
    data = bytearray(path.read_bytes())
    data[module.offset + 20] ^= 1
    path.write_bytes(data)


# --- Keys that are refused ---------------------------------------------------------------------------------


def test_a_whole_file_conforms(make) -> None:
    report = keytools().verify_file(make())
    assert report.conforms
    assert not report.findings
    assert not report.denied
    assert report.modules["authentic"] > 50


def test_a_refused_column_key_is_never_a_pass(make) -> None:
    path, reader = make(), keytools()
    reader.kms.deny("pii")  # type: ignore[union-attr]
    report = reader.verify_file(path)
    assert report.verdict is Verdict.INCOMPLETE
    assert not report.conforms
    assert list(report.denied) == ["name"]
    assert "access denied" in report.denied["name"]
    # Other columns were checked, this one was not: no rule about columns simply holds.
    result = report.result("data-page-authentic")
    assert result.outcome is Outcome.NOT_CHECKED
    assert "'name'" in result.reasons[0]
    assert report.damage is None
    # The footer's DEK unwraps; the DEK of `name` was not tried.
    assert report.result("key-wrap").outcome is Outcome.NOT_CHECKED
    assert report.result("kek-length").outcome is Outcome.NOT_CHECKED


def test_keys_that_nobody_unwrapped_are_not_checked(make) -> None:
    for key_material in ("internal", "external"):
        report = verify_file(
            None, FileLocation.resolve(make(f"{key_material}.parquet", key_material=key_material))
        )
        assert report.conforms
        assert report.result("key-wrap").outcome is Outcome.NOT_CHECKED
    assert report.result("key-material-file").outcome is Outcome.NOT_CHECKED
    single = verify_file(None, FileLocation.resolve(make(double_wrapping=False)))
    assert single.result("key-wrap").outcome is Outcome.NOT_CHECKED
    assert single.result("kek-length").outcome is Outcome.NOT_APPLICABLE


def test_a_refused_footer_key_is_never_a_pass(make) -> None:
    path, reader = make(), keytools()
    reader.kms.deny("footer")  # type: ignore[union-attr]
    report = reader.verify_file(path)
    assert report.verdict is Verdict.INCOMPLETE
    assert "footer" in report.denied
    assert report.result("footer-authentic").outcome is Outcome.NOT_CHECKED
    assert report.result("wanted-keys").outcome is Outcome.NOT_CHECKED


def test_a_violation_elsewhere_counts_beside_a_refused_key(make) -> None:
    path, reader = make(), keytools()
    flip(path, ModuleType.DATA_PAGE, 0, 0, 1)
    reader.kms.deny("pii")  # type: ignore[union-attr]
    report = reader.verify_file(path)
    assert report.verdict is Verdict.VIOLATED
    assert broken(report) == {"data-page-authentic"}


def test_a_plaintext_footer_without_keys_shows_structure(make) -> None:
    path, reader = make(plaintext_footer=True), keytools(plaintext_footer=True)
    reader.kms.deny("footer")  # type: ignore[union-attr]
    report = reader.verify_file(path)
    assert report.verdict is Verdict.INCOMPLETE
    assert broken(report) == {"names-visible"}


def test_a_file_on_another_file_system(make) -> None:
    filesystem = pafs._MockFileSystem()
    path = make()
    with filesystem.open_output_stream("file.parquet") as stream:
        stream.write(path.read_bytes())
    with keytools() as reader:
        assert reader.verify_file("file.parquet", filesystem=filesystem).conforms
        assert reader.inspect_file("file.parquet", filesystem=filesystem).footer_is_authentic


# --- Requirements of the table -----------------------------------------------------------------------------


def test_what_the_table_wants_is_compared(make) -> None:
    path = make()
    assert broken(keytools(column_keys={"pii": ["name"], "other": ["id"]}).verify_file(path)) == {"wanted-keys"}
    assert broken(keytools(column_keys={"other": ["name"]}).verify_file(path)) == {"wanted-keys"}
    # The rest of the other columns is compared nevertheless: readers do that, too.
    without = keytools(column_keys={"pii": ["name", "surname"]})
    assert broken(without.verify_file(path)) == {"wanted-columns"}
    assert broken(keytools(column_keys={"pii": ["surname"]}).verify_file(path)) == {
        "wanted-columns",
        "wanted-keys",
    }
    plain = make("plain.parquet", unlisted_columns="plaintext")
    assert broken(keytools().verify_file(plain)) == {"wanted-encryption"}
    assert broken(keytools(aad_prefix="office/{file_name}").verify_file(path)) == {"prefix-expected"}


def test_one_of_several_tables(make) -> None:
    """Without a name, everything but the table is checked, and the report says so; a foreign prefix is refused."""
    path = make()
    kms = {"type": "in_memory", "keys": MASTER_KEYS}
    tables = {"office": POLICY | {"aad_prefix": "office/{file_name}"}, "shop": POLICY}
    reader = Keytools.from_mapping({"version": 1, "kms": kms, "tables": tables})
    report = reader.verify_file(path)
    assert (report.verdict, report.table) == (Verdict.INCOMPLETE, None)
    unchecked = {result.rule.id: result.reasons for result in report.rules if result.reasons}
    assert set(unchecked) == {rule.id for rule in RULES if rule.id.startswith("wanted-")}
    assert set(unchecked.values()) == {("there are 2 tables, and none was named",)}
    named = reader.verify_file(path, table_name="shop")
    assert (named.verdict, named.table) == (Verdict.CONFORMS, "shop")
    assert reader.verify_file(path, table_name="office").verdict is Verdict.VIOLATED
    assert reader.inspect_file(path).footer_is_authentic
    stranger = make("stranger.parquet", aad_prefix="attic/{file_name}")
    assert broken(reader.verify_file(stranger)) == {"prefix-expected"}


def test_without_tables_a_file_is_compared_with_none(make) -> None:
    path = make()
    without = Keytools.from_mapping({"version": 1, "kms": {"type": "in_memory", "keys": MASTER_KEYS}})
    report = without.verify_file(path)
    assert (report.verdict, report.table) == (Verdict.CONFORMS, None)
    assert {result.outcome for result in report.rules if result.rule.id.startswith("wanted-")} == {
        Outcome.NOT_APPLICABLE
    }


FOREIGN = {
    "footer key": ({"footer_key": "other", "unlisted_columns": "plaintext"}, {"wanted-keys"}),
    "column key": ({"column_keys": {"other": ["name"]}}, {"wanted-keys"}),
    "a key for what is plaintext": ({"column_keys": {"pii": ["name"], "other": ["price"]}}, {"wanted-keys"}),
    "plaintext": ({"column_keys": {"footer": ["id"]}, "unlisted_columns": "plaintext"}, {"wanted-encryption"}),
    "algorithm": ({"algorithm": "AES_GCM_CTR_V1"}, {"wanted-algorithm", "ctr"}),
}


@pytest.mark.parametrize(("changes", "rules"), FOREIGN.values(), ids=FOREIGN)
def test_what_readers_refuse_is_a_finding(make, changes: dict[str, Any], rules: set[str]) -> None:
    path = make(**changes)
    own = keytools(unlisted_columns="plaintext")
    with pytest.raises(TableMismatchError):
        own.read_table(path)
    report = own.verify_file(path)
    assert broken(report) >= rules
    assert report.verdict is Verdict.VIOLATED


def test_a_foreign_footer_key_is_found_also_where_it_is_refused(make) -> None:
    path, reader = make(footer_key="other"), keytools()
    reader.kms.deny("other")  # type: ignore[union-attr]
    assert broken(reader.verify_file(path)) == {"wanted-keys"}


def test_a_key_that_the_table_trusts_is_no_finding(make) -> None:
    path = make(column_keys={"other": ["name"]})
    assert broken(keytools().verify_file(path)) == {"wanted-keys"}
    assert keytools(also_trusted=["other"]).verify_file(path).conforms


def test_which_key_counts_and_not_which_dek(make) -> None:
    """A column under the footer's DEK, or under its own DEK that the footer's master key wraps."""
    path = make(column_keys={"footer": ["id"], "pii": ["name"]})
    assert keytools().verify_file(path).conforms
    assert keytools(column_keys={"footer": ["id", "price"], "pii": ["name"]}).verify_file(make()).conforms


# --- Keys and names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key_material", ["internal", "external"])
def test_a_column_may_be_called_footer(make, key_material: str) -> None:
    table = TABLE.rename_columns(["id", "footer", "price"])
    changes = {"column_keys": {"pii": ["footer"]}, "key_material": key_material}
    pq_path = make(table=table.append_column("name", TABLE["name"]), **changes)
    reader = keytools(**changes)
    assert reader.verify_file(pq_path).conforms
    reader.kms.deny("pii")  # type: ignore[union-attr]
    reader.clear_caches()
    report = reader.verify_file(pq_path)
    assert report.verdict is Verdict.INCOMPLETE
    assert list(report.denied) == ["column footer"]
    assert not broken(report)
    denied = {column.path for column in reader.inspect_file(pq_path).columns if column.denied is not None}
    assert denied == {"footer"}


def test_a_key_of_two_names_is_one_key(tmp_path: Path) -> None:
    plain, path = tmp_path / "plain.parquet", tmp_path / "file.parquet"
    pq.write_table(TABLE, plain)
    one, two = (base64.b64encode(letter * 16).decode() for letter in (b"1", b"2"))

    def report(**data_keys: str) -> FileReport:
        table = {"footer_key": "f", "column_keys": {"a": ["id"], "b": ["name"]}, "unlisted_columns": "plaintext"}
        configuration = {"version": 1, "data_keys": data_keys, "tables": {"shop": table}}
        with Keytools.from_mapping(configuration) as writer:
            writer.encrypt_file(plain, path)
            return writer.verify_file(path)

    three = base64.b64encode(b"3" * 16).decode()
    assert broken(report(f=one, a=two, b=three)) == {"no-prefix"}
    assert "'a' (column 'id'), 'b' (column 'name')" in report(f=one, a=two, b=two).findings[-1].message
    assert "that is the footer's DEK" in report(f=one, a=one, b=two).findings[-1].message


def test_a_table_wants_long_keys(make) -> None:
    path = make()
    assert broken(keytools(data_key_length_bits=256).verify_file(path)) == {"wanted-key-length"}
    assert keytools(data_key_length_bits=128).verify_file(make(data_key_length_bits=256)).conforms


def test_a_table_wants_its_prefix_hidden(make) -> None:
    path = make()
    assert broken(keytools(store_aad_prefix=False).verify_file(path)) == {"wanted-prefix"}
    assert keytools(store_aad_prefix=False).verify_file(make(store_aad_prefix=False)).conforms


# --- Plaintext where it is allowed -------------------------------------------------------------------------


def test_a_plaintext_file_is_not_what_a_table_wants_though_readers_take_it(tmp_path: Path) -> None:
    path = tmp_path / "file.parquet"
    pq.write_table(TABLE, path)
    report = reading_plaintext_too().verify_file(path)
    assert report.verdict is Verdict.VIOLATED
    assert broken(report) == {"prefix-expected", "wanted-encryption", "wanted-algorithm", "wanted-footer"}
    kms = {"type": "in_memory", "keys": MASTER_KEYS}
    allowing = Keytools.from_mapping({"version": 1, "kms": kms, "reading": {"plaintext_files": "allow"}})
    assert allowing.verify_file(path).conforms
    assert broken(allowing.verify_file(path, aad_prefix="shop")) == {"prefix-expected"}


# --- Expected prefixes without keys ------------------------------------------------------------------------


def test_a_prefix_that_only_keys_can_show_is_not_answered_without_them(make) -> None:
    hidden = FileLocation.resolve(make(store_aad_prefix=False))
    assert verify_file(None, hidden).conforms
    report = verify_file(None, hidden, aad_prefix="shop/file.parquet")
    assert report.verdict is Verdict.INCOMPLETE
    assert report.result("prefix-expected").outcome is Outcome.NOT_CHECKED
    stored = FileLocation.resolve(make("stored.parquet"))
    assert verify_file(None, stored, aad_prefix="shop/stored.parquet").conforms
    assert verify_file(None, stored, aad_prefix="shop").verdict is Verdict.VIOLATED


# --- Damage ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "rule", "loss"),
    [
        ((ModuleType.DATA_PAGE, 1, 0, 1), "data-page-authentic", Loss(1, 0, "id", (1,))),
        ((ModuleType.DATA_PAGE_HEADER, 1, 0, 1), "data-page-header-authentic", Loss(1, 0, "id", (), 1)),
        ((ModuleType.DICTIONARY_PAGE, 1, 1), "dictionary-page-authentic", Loss(1, 1, "name", None)),
        ((ModuleType.DICTIONARY_PAGE_HEADER, 1, 1), "dictionary-page-header-authentic", Loss(1, 1, "name", (), 0)),
    ],
)
def test_damage_is_named_and_the_rest_is_salvaged(make, tmp_path: Path, module, rule: str, loss: Loss) -> None:
    path = make()
    flip(path, *module)
    with keytools() as reader:
        report = reader.verify_file(path)
        assert broken(report) == {rule}
        assert report.damage is not None
        assert report.damage.losses == (loss,)
        assert report.damage.readable_row_groups == (0, 2)
        with pytest.raises(DecryptionError):
            reader.decrypt_file(path, tmp_path / "all.parquet")
        result = reader.salvage_file(path, tmp_path / "rest.parquet")
    assert result.missing_row_groups == (1,)
    assert result.losses == (loss,)
    assert not result.is_whole
    rest = pq.read_table(tmp_path / "rest.parquet")
    assert rest.equals(pa.concat_tables([TABLE.slice(0, 30), TABLE.slice(60)]))


@pytest.mark.parametrize(
    "module_type",
    [
        ModuleType.OFFSET_INDEX,
        ModuleType.COLUMN_INDEX,
        *([ModuleType.BLOOM_FILTER_HEADER] if WRITES_BLOOM_FILTERS else []),
    ],
)
def test_a_damaged_index_costs_no_row(make, tmp_path: Path, module_type: ModuleType) -> None:
    path = make()
    flip(path, module_type, 1, 1)
    with keytools() as reader:
        report = reader.verify_file(path)
        assert report.damage is not None
        assert report.damage.losses == ()
        assert report.damage.damaged_indexes == ((1, 1),)
        result = reader.salvage_file(path, tmp_path / "rest.parquet")
    assert result.missing_row_groups == ()
    assert result.dropped_indexes == ((1, 1),)
    assert not result.is_whole
    assert pq.read_table(tmp_path / "rest.parquet").equals(TABLE)


@pytest.fixture
def alter_header(make) -> Callable[..., Path]:
    """Writes a file with a plaintext column `price`, and changes one of its page headers, keeping the length."""

    def write(compression: str, change: Callable[[PageHeader], None]) -> Path:
        path = make(compression=compression, unlisted_columns="plaintext")
        with keytools() as reader:
            chunks = reader.inspect_file(path).chunks
        modules = next(c for c in chunks if (c.row_group_ordinal, c.column_ordinal) == (1, 2)).modules
        found = next(m for m in modules if m.module_type is ModuleType.DATA_PAGE_HEADER and m.page_ordinal == 1)
        data = bytearray(path.read_bytes())
        header, end = PageHeader.read(bytes(data), found.offset)
        change(header)
        assert len(header.serialise()) == end - found.offset
        data[found.offset : end] = header.serialise()
        path.write_bytes(data)
        return path

    return write


def _more_bytes(header: PageHeader) -> None:
    header.uncompressed_page_size += 1


def _fewer_values(header: PageHeader) -> None:
    assert header.data_page_header is not None
    header.data_page_header.num_values -= 1


@pytest.mark.parametrize(
    ("compression", "change", "rule", "loss"),
    [
        ("none", _more_bytes, "page-size", Loss(1, 2, "price", (1,))),
        ("snappy", _more_bytes, "page-content", Loss(1, 2, "price", (1,))),
        ("zstd", _fewer_values, "value-count", Loss(1, 2, "price", None)),
    ],
)
def test_plaintext_pages_that_cannot_be_read_are_not_salvaged(
    alter_header, tmp_path: Path, compression: str, change: Callable[[PageHeader], None], rule: str, loss: Loss
) -> None:
    path = alter_header(compression, change)
    with keytools(unlisted_columns="plaintext") as reader:
        report = reader.verify_file(path)
        assert broken(report) - {"offset-index-rows"} == {rule}
        assert report.damage is not None
        assert report.damage.losses == (loss,)
        result = reader.salvage_file(path, tmp_path / "rest.parquet")
    assert result.missing_row_groups == (1,)
    rest = pq.read_table(tmp_path / "rest.parquet")
    assert rest.equals(pa.concat_tables([TABLE.slice(0, 30), TABLE.slice(60)]))


@pytest.mark.parametrize("compression", ["snappy", "gzip", "zstd"])
def test_a_plaintext_page_that_is_not_its_codecs_is_named(make, compression: str) -> None:
    path = make(compression=compression, unlisted_columns="plaintext")
    with keytools(unlisted_columns="plaintext") as reader:
        chunk = next(c for c in reader.inspect_file(path).chunks if c.column_ordinal == 2)
        page = next(module for module in chunk.modules if module.module_type is ModuleType.DATA_PAGE)
        data = bytearray(path.read_bytes())
        data[page.offset] ^= 1
        path.write_bytes(data)
        assert broken(reader.verify_file(path)) == {"page-content"}


def test_a_whole_file_is_salvaged_whole(make, tmp_path: Path) -> None:
    with keytools() as reader:
        result = reader.salvage_file(make(), tmp_path / "rest.parquet")
    assert result.is_whole
    assert pq.read_table(tmp_path / "rest.parquet").equals(TABLE)


def test_nothing_is_salvaged_from_nothing(make, tmp_path: Path) -> None:
    path = make()
    for row_group in range(3):
        flip(path, ModuleType.DATA_PAGE_HEADER, row_group, 0, 0)
    with keytools() as reader, pytest.raises(DecryptionError, match="no row group is whole"):
        reader.salvage_file(path, tmp_path / "rest.parquet")
    assert not (tmp_path / "rest.parquet").exists()


def test_salvage_refuses_what_is_no_damage(make, tmp_path: Path) -> None:
    path, reader = make(), keytools()
    with pytest.raises(OutputError):
        reader.salvage_file(path, path)
    plain = tmp_path / "plain.parquet"
    pq.write_table(TABLE, plain)
    with pytest.raises(NotEncryptedError):
        reader.salvage_file(plain, tmp_path / "rest.parquet")
    reader.kms.deny("pii")  # type: ignore[union-attr]
    reader.clear_caches()
    with pytest.raises(ColumnAccessDeniedError):
        reader.salvage_file(path, tmp_path / "rest.parquet")


def test_a_lost_footer_loses_the_file(make) -> None:
    path = make()
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    report = keytools().verify_file(path)
    assert broken(report) == {"footer-authentic"}
    assert report.damage is not None
    assert report.damage.file_is_lost


def test_what_a_forged_footer_says_is_not_salvaged(make, tmp_path: Path) -> None:
    path = make(plaintext_footer=True)
    data = bytearray(path.read_bytes())
    at = data.index(b"parquet-cpp-arrow")
    data[at] ^= 1
    path.write_bytes(data)
    with keytools(plaintext_footer=True) as reader:
        report = reader.verify_file(path)
        assert "signature-valid" in broken(report)
        assert report.damage == Damage(file_is_lost=True)
        with pytest.raises(FooterSignatureError):
            reader.salvage_file(path, tmp_path / "rest.parquet")
    assert not (tmp_path / "rest.parquet").exists()


def test_what_was_not_looked_at_is_neither_lost_nor_whole(make, tmp_path: Path) -> None:
    path = make(store_aad_prefix=False)
    kms = {"type": "in_memory", "keys": MASTER_KEYS}
    with Keytools.from_mapping({"version": 1, "kms": kms}) as without_prefix:
        report = without_prefix.verify_file(path)
        assert report.verdict is Verdict.INCOMPLETE
        assert not broken(report)
        assert report.damage is None
        pq.write_table(TABLE, tmp_path / "plain.parquet")
        assert without_prefix.verify_file(tmp_path / "plain.parquet").damage is None


# --- Data sets ---------------------------------------------------------------------------------------------


def test_a_folder_is_one_data_set(make) -> None:
    folder = make("part-0.parquet").parent
    make("part-1.parquet")
    report = keytools().verify_folder(folder, part_count=2)
    assert report.conforms
    assert len(report.files) == 2
    report = keytools().verify_folder(folder, part_count=3)
    assert not report.conforms
    assert {r.rule.id for r in report.rules if r.outcome is Outcome.BROKEN} == {"part-missing"}


def test_small_files_are_verified_at_the_same_time_and_reported_in_order(
    make, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make("part-0.parquet").parent
    for number in range(1, 5):
        make(f"part-{number}.parquet")
    verify, together = MemberVerifier.verify, threading.Barrier(4)
    broken_file = folder / "part-2.parquet"
    broken_file.write_bytes(broken_file.read_bytes()[:-1])

    def waiting(*arguments: Any, **options: Any) -> Any:
        if not arguments[1].path.endswith("part-0.parquet"):
            # All but the first one; they pass only together.
            together.wait(60)
        return verify(*arguments, **options)

    monkeypatch.setattr(MemberVerifier, "verify", waiting)
    progress: list[str] = []
    report = keytools().verify_folder(folder, on_progress=lambda file: progress.append(file.path))
    names = [Path(file.path).name for file in report.files]
    assert names == [f"part-{number}.parquet" for number in range(5)] == [Path(path).name for path in progress]
    assert [file.conforms for file in report.files] == [True, True, False, True, True]


def test_an_error_of_one_file_ends_the_verification_of_a_folder(make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make("part-0.parquet").parent
    for number in range(1, 30):
        make(f"part-{number}.parquet")
    begun: list[str] = []

    def failing(*arguments: Any, **options: Any) -> Any:
        begun.append(arguments[1].path)
        raise MemoryError

    monkeypatch.setattr(MemberVerifier, "verify", failing)
    with pytest.raises(MemoryError):
        keytools().verify_folder(folder)
    assert len(begun) == 1


def test_strangers_in_a_folder_are_found(make) -> None:
    folder = make("part-0.parquet").parent
    (folder / "part-1.parquet").write_bytes((folder / "part-0.parquet").read_bytes())
    pq.write_table(TABLE, folder / "part-2.parquet")
    make("part-3.parquet", aad_prefix="office/{file_name}")
    (folder / "_KEY_MATERIAL_FOR_part-4.parquet.json").write_text("{}")
    report = keytools().verify_folder(folder)
    by_name = {Path(file.path).name: broken(file) for file in report.files}
    assert by_name == {
        "part-0.parquet": set(),
        "part-1.parquet": {"prefix-expected"},
        "part-2.parquet": {"encrypted"},
        "part-3.parquet": {"prefix-expected"},
    }
    assert {r.rule.id for r in report.rules if r.outcome is Outcome.BROKEN} == {
        "file-copied",
        "prefix-shared",
        "dek-shared",
        "part-gap",
        "plaintext-among",
        "part-missing",
    }
    assert report.verdict is Verdict.VIOLATED


def test_a_file_that_is_no_part_is_found_where_parts_are_counted(make) -> None:
    folder = make("part-0.parquet").parent
    make("part-1.parquet")
    make("stranger.parquet")
    report = keytools().verify_folder(folder, part_count=2)
    assert data_set_rules(report) == {"part-doubled"}
    assert not report.conforms
    assert keytools().verify_folder(folder).conforms
    assert data_set_rules(keytools().verify_folder(folder, part_count=10**12)) == {"part-doubled", "part-missing"}


def test_what_is_no_file_where_readers_look_for_one_is_no_pass(make) -> None:
    folder = make("part-0.parquet").parent
    link = folder / "part-1.parquet"
    link.symlink_to("/nowhere/part-1.parquet")
    report = keytools().verify_folder(folder)
    assert report.verdict is Verdict.INCOMPLETE
    assert [file.path for file in report.files if not file.conforms] == [str(link)]
    assert not report.skipped
    link.unlink()
    os.mkfifo(folder / "part-2.parquet")
    assert keytools().verify_folder(folder).verdict is Verdict.INCOMPLETE
    (folder / "part-2.parquet").rename(folder / "_pipe")
    assert keytools().verify_folder(folder).conforms
    (folder / "loop").symlink_to(folder)
    assert keytools().verify_folder(folder).verdict is Verdict.INCOMPLETE


@pytest.mark.parametrize("name", ["part-1", "PART-1.PARQUET", "part-00001.gz"])
def test_what_is_called_a_part_and_is_none_is_no_pass(make, name: str) -> None:
    folder = make("part-0.parquet").parent
    (folder / "notes.txt").write_text("Parts of the shop.")
    (folder / "_part-2").write_bytes(bytes(100))
    assert keytools().verify_folder(folder).conforms
    (folder / name).write_bytes(bytes(100))
    report = keytools().verify_folder(folder)
    assert report.verdict is Verdict.VIOLATED
    assert [file.path for file in report.files if not file.conforms] == [str(folder / name)]


def test_a_file_that_cannot_be_read_hides_nothing(make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make("part-0.parquet").parent
    for name in ("part-1.parquet", "part-2.parquet", "part-3.parquet"):
        make(name)
    flip(folder / "part-3.parquet", ModuleType.DATA_PAGE, 0, 0, 1)
    failures = {
        "part-0.parquet": OSError(5, "Input/output error"),
        "part-1.parquet": PermissionError(13, "Permission denied"),
        "part-2.parquet": ParquetFormatError("the file ends early; it changed while it was read"),
    }

    @contextlib.contextmanager
    def opening(location: FileLocation) -> Iterator[Any]:
        if location.name in failures:
            raise failures[location.name]
        with open_source(location) as source:
            yield source

    monkeypatch.setattr("parquet_keytools.conformance.verification.open_source", opening)
    report = verify_folder(None, FileLocation.resolve(folder))
    assert [file.verdict for file in report.files] == [*[Verdict.INCOMPLETE] * 3, Verdict.CONFORMS]
    with keytools() as reader:
        assert broken(reader.verify_folder(folder).files[3]) == {"data-page-authentic"}


def test_plaintext_under_a_name_that_is_not_utf8_is_found(make) -> None:
    folder = make("part-0.parquet").parent
    plain = folder / "plain"
    pq.write_table(TABLE, plain)
    plain.rename(folder / os.fsdecode(b"_caf\xe9.parquet"))
    (folder / os.fsdecode(b"_temporary\xe9")).mkdir()
    report = keytools().verify_folder(folder)
    assert data_set_rules(report) == {"plaintext-skipped"} and not report.conforms
    (found,) = [result for result in report.rules if result.rule.id == "plaintext-skipped"]
    assert [finding.message for finding in found.findings] == [
        r"_caf\xe9.parquet begins as a plaintext file does."
    ]


def test_plaintext_that_was_left_behind_is_found(make) -> None:
    folder = make("part-0.parquet").parent
    (folder / "_temporary" / "0").mkdir(parents=True)
    plain = folder / "_temporary" / "0" / "part-1.parquet"
    pq.write_table(TABLE, plain)
    report = keytools().verify_folder(folder)
    assert data_set_rules(report) == {"plaintext-skipped"}
    assert not report.conforms
    plain.write_bytes(plain.read_bytes()[:200])
    assert data_set_rules(keytools().verify_folder(folder)) == {"plaintext-skipped"}
    # Encrypted files may be there, in both modes.
    plain.unlink()
    make("signed.parquet", plaintext_footer=True).rename(folder / "_temporary" / "signed.parquet")
    make("hidden.parquet").rename(folder / ".hidden.parquet")
    assert not data_set_rules(keytools().verify_folder(folder))


def test_a_summary_that_is_encrypted_shows_nothing(make) -> None:
    # As Dask writes it through the file system.
    path = make("part-0.parquet")
    shutil.copy(path, path.with_name("_common_metadata"))
    assert not data_set_rules(keytools().verify_folder(path.parent))
    signed = make("signed.parquet", plaintext_footer=True)
    signed.rename(path.with_name("_common_metadata"))
    assert data_set_rules(keytools().verify_folder(path.parent)) == {"summary-file"}


def test_a_file_that_a_summary_lists_is_missed(make) -> None:
    folder = make("part-0.parquet").parent
    metadata: list[Any] = []
    pq.write_table(TABLE, folder / "part-1.parquet", metadata_collector=metadata)
    metadata[0].set_file_path("part-1.parquet")
    pq.write_metadata(TABLE.schema, folder / "_metadata", metadata)
    (folder / "part-1.parquet").unlink()
    report = keytools().verify_folder(folder)
    assert data_set_rules(report) == {"part-listed", "summary-file"}
    (folder / "_metadata").write_bytes(b"PAR1 is no footer PAR1")
    assert data_set_rules(keytools().verify_folder(folder)) == {"summary-file"}


def test_keys_that_are_not_known_are_not_said_to_be_different(make) -> None:
    folder = make("part-0.parquet").parent
    make("part-1.parquet")
    report = verify_folder(None, FileLocation.resolve(folder))
    outcomes = {result.rule.id: result.outcome for result in report.rules}
    assert report.conforms
    assert outcomes["dek-shared"] is Outcome.NOT_CHECKED
    assert outcomes["nonce-shared"] is Outcome.NOT_CHECKED
    reader = keytools()
    reader.kms.deny("pii")  # type: ignore[union-attr]
    outcomes = {result.rule.id: result.outcome for result in reader.verify_folder(folder).rules}
    assert outcomes["dek-shared"] is Outcome.NOT_CHECKED


def test_a_name_that_is_no_text_hides_nothing(make) -> None:
    folder = make("part-0.parquet").parent
    name = os.fsdecode(b"\xff\xfe.parquet")
    (folder / name).write_bytes((folder / "part-0.parquet").read_bytes())
    report = keytools().verify_folder(folder)
    assert report.verdict is Verdict.INCOMPLETE
    assert sorted(file.verdict.value for file in report.files) == ["conforms", "incomplete"]


def test_an_empty_folder_is_no_pass(tmp_path: Path) -> None:
    (tmp_path / "_passed_over.parquet").write_bytes(b"PAR1")
    with pytest.raises(NoParquetFilesError, match="no Parquet files"):
        keytools().verify_folder(tmp_path)


# --- Inspection --------------------------------------------------------------------------------------------


class CountingFile:
    """A source that counts the bytes read."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.data = path.read_bytes()
        self.size_bytes = len(self.data)
        self.read_bytes = 0

    def read_at(self, offset: int, length: int) -> bytes:
        assert 0 <= offset <= offset + length <= self.size_bytes
        self.read_bytes += length
        return self.data[offset : offset + length]


def test_inspection_without_keys_reads_the_footer_only(make) -> None:
    from parquet_keytools.conformance.inspection import inspect_source

    big = pa.concat_tables([TABLE.append_column("noise", pa.array([f"{n:x>4000}" for n in range(ROWS)]))] * 20)
    source = CountingFile(make(table=big, plaintext_footer=True))
    shown = inspect_source(source)
    assert source.size_bytes > 200_000
    assert source.read_bytes <= 64 * 1024 + 4 + shown.footer_length + 8
    assert [column.path for column in shown.columns] == ["id", "name", "price", "noise"]
    assert shown.footer_is_authentic is None
    assert "number of values" in shown.columns[0].shows
    assert "statistics" not in shown.columns[0].shows


def test_inspection_with_keys_shows_every_module(make) -> None:
    path = make()
    with keytools() as reader:
        shown = reader.inspect_file(path)
        assert reader.inspect_file(path, with_keys=False).chunks == ()
    assert shown.footer_is_authentic
    assert shown.aad_prefix == "shop/file.parquet"
    assert len(shown.row_groups) == 3
    assert len(shown.chunks) == 9
    assert sum(shown.bytes_by_key.values()) == path.stat().st_size - 4
    pages = [module for module in shown.chunks[0].modules if module.module_type is ModuleType.DATA_PAGE]
    assert [page.page_ordinal for page in pages] == [0, 1, 2]
    assert shown.columns[1].key is not None
    assert (shown.columns[1].key.name, shown.columns[1].key.double_wrapping) == ("pii", True)


def test_inspection_shows_both_modules_of_a_bloom_filter(make) -> None:
    path = make()
    with keytools() as reader:
        shown = reader.inspect_file(path)
        chunk = next(c for c in shown.chunks if (c.row_group_ordinal, c.column_ordinal) == (1, 1))
        header, bitset = (
            next(module for module in chunk.modules if module.module_type is module_type)
            for module_type in (ModuleType.BLOOM_FILTER_HEADER, ModuleType.BLOOM_FILTER_BITSET)
        )
        assert bitset.offset == header.offset + header.length
        flip(path, ModuleType.BLOOM_FILTER_BITSET, 1, 1)
        assert broken(reader.verify_file(path)) == {"bloom-filter-bitset-authentic"}
        flip(path, ModuleType.BLOOM_FILTER_HEADER, 1, 1)
        damaged = reader.inspect_file(path)
    assert sum(damaged.bytes_by_key.values()) == path.stat().st_size - 4
    assert [finding.rule.id for finding in damaged.flaws] == ["bloom-filter-header-authentic"]


def test_bytes_under_a_key_are_those_under_no_other(tmp_path: Path) -> None:
    """The footer's bytes and plaintext do not count, whatever the key is called."""
    plain, path = tmp_path / "plain.parquet", tmp_path / "file.parquet"
    pq.write_table(TABLE, plain)
    keys = {name: base64.b64encode(bytes([n] * 16)).decode() for n, name in enumerate(("footer", "plaintext"))}
    table = {
        "footer_key": "footer",
        "column_keys": {"footer": ["id"], "plaintext": ["name"]},
        "unlisted_columns": "plaintext",
    }
    with Keytools.from_mapping({"version": 1, "data_keys": keys, "tables": {"shop": table}}) as reader:
        reader.encrypt_file(plain, path)
        shown = reader.inspect_file(path)
    sizes = [sum(module.length for module in chunk.modules) for chunk in shown.chunks]
    assert shown.footer_length is not None
    assert shown.bytes_by_key == {
        "footer": shown.footer_length + 8,
        "key footer": sizes[0],
        "key plaintext": sizes[1],
        "plaintext": sizes[2],
    }


def test_keys_that_only_the_configuration_names_are_told_apart(tmp_path: Path) -> None:
    names = {"footer": "f", "columns": {"id": "a", "name": "b"}}
    keys = {name: base64.b64encode(name.encode() * 16).decode() for name in ("f", "a", "b")}
    columns = {0: (b"a" * 16, None), 1: (b"b" * 16, None), 2: FOOTER_KEY}
    made = recipe(1, footer_key=b"f" * 16, footer_key_metadata=None, columns=columns)
    path = tmp_path / "file.parquet"
    path.write_bytes(SealedFile(made).make())
    reading = {"keys_without_metadata": names}
    with Keytools.from_mapping({"version": 1, "data_keys": keys, "reading": reading}) as reader:
        shown = reader.inspect_file(path)
        assert set(shown.bytes_by_key) == {"footer", "f", "a", "b"}
        assert set(reader.inspect_file(path, with_keys=False).bytes_by_key) == {"footer"}


def test_inspection_says_which_key_is_refused(make) -> None:
    path, reader = make(), keytools()
    reader.kms.deny("pii")  # type: ignore[union-attr]
    shown = reader.inspect_file(path)
    assert shown.columns[1].denied is not None
    assert "access denied" in shown.columns[1].denied
    assert [column.denied for column in shown.columns if column.path != "name"] == [None, None]


def test_garbage_is_shown_as_such(tmp_path: Path) -> None:
    path = tmp_path / "garbage.parquet"
    path.write_bytes(b"garbage" * 10)
    shown = keytools().inspect_file(path)
    assert shown.mode is None
    assert [finding.rule.id for finding in shown.flaws] == ["magic"]
