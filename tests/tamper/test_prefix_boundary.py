"""Bytes moved between AAD prefix and file unique, in every reader: neither key nor cipher can detect it."""

from __future__ import annotations

import base64
import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest
from key_services import key_service
from prefix_files import UNIQUE, aad_fields, data, document, present, write
from pyarrow_versions import DECRYPTS_IN_THREADS
from typer.testing import CliRunner

from parquet_keytools import Keytools
from parquet_keytools.cli import app
from parquet_keytools.configuration_check import check_columns
from parquet_keytools.conformance.report import Outcome, Verdict
from parquet_keytools.encryption.aad import delimited_prefix
from parquet_keytools.errors import AadPrefixError, ConfigurationError, DecryptionError, KeytoolsError
from parquet_keytools.format.structs import FileCryptoMetaData
from parquet_keytools.kms.in_memory import InMemoryKms

LAYOUTS: dict[str, dict[str, Any]] = {
    "encrypted": {},
    "signed": {"plaintext_footer": True},
    "ctr": {"algorithm": "AES_GCM_CTR_V1"},
    "external": {"key_material": "external"},
    "single wrapping": {"double_wrapping": False},
    "supplied": {"store_aad_prefix": False},
    "supplied, signed": {"store_aad_prefix": False, "plaintext_footer": True},
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


class CountingKms(InMemoryKms):
    """Counts its calls."""

    def __init__(self) -> None:
        key = b"0123456789012345"
        super().__init__({"kf": key, "kc": key, "new": key})
        self.unwrapped = 0

    def _unwrap(self, *arguments: Any) -> Any:
        self.unwrapped += 1
        return super()._unwrap(*arguments)


def tools(**changes: Any) -> Keytools:
    return Keytools.from_mapping(document(**changes), kms=CountingKms())


def unwrapped(keytools: Keytools) -> int:
    assert isinstance(keytools.kms, CountingKms)
    return keytools.kms.unwrapped


@dataclass(frozen=True)
class Move:
    """How bytes are moved; `part1` is the name under which the file is read.

    Attributes:
        prefix: The honest writer's prefix.
        shown_prefix: The prefix that the file then shows.
        shown_unique: The file unique that the file then shows.
        unique: The honest writer's file unique.
    """

    prefix: bytes
    shown_prefix: bytes
    shown_unique: bytes
    unique: bytes = UNIQUE


MOVES = {
    "the end of a prefix": Move(b"t/part10", b"t/part1", b"0" + UNIQUE),
    "the end of a prefix with its delimiter": Move(b"t/part10\0", b"t/part1", b"0\0" + UNIQUE),
    "the delimiter": Move(b"t/part1\0", b"t/part1", b"\0" + UNIQUE),
    "the beginning of the file unique": Move(b"t/par", b"t/part1", UNIQUE, b"t1" + UNIQUE),
    "the beginning of a short one": Move(b"t/par", b"t/part1", UNIQUE[2:], b"t1" + UNIQUE[2:]),
    "the whole file unique": Move(b"t/", b"t/part1", b"", b"part1"),
    "a delimiter out of the file unique": Move(b"t/part", b"t/part1\0", UNIQUE[2:], b"1\0" + UNIQUE[2:]),
    "most of a prefix": Move(b"t/part1/of/another/table\0", b"t/part1", b"/of/another/table\0" + UNIQUE),
}
"""The case "the beginning of the file unique" looks like an honest file: its writer made 10 bytes."""

CANNOT_BE_SEEN = {"the beginning of the file unique"}
moves = pytest.mark.parametrize("move", [name for name in MOVES if name not in CANNOT_BE_SEEN])


def attacked(folder: Path, layout: str, move: str) -> Path:
    """Return a file that is presented as `part1`."""
    settings, how = LAYOUTS[layout], MOVES[move]
    path = folder / "set" / "part1"
    with tools(**settings) as writer:
        write(writer, path, how.prefix, how.unique, table=data(1000))
    supplied = not settings.get("store_aad_prefix", True)
    present(path, None if supplied else how.shown_prefix, how.shown_unique, supply=supplied)
    return path


def readers(reader: Keytools, path: Path, target: Path, **options: Any) -> dict[str, Callable[[], object]]:
    return {
        "read_table": lambda: reader.read_table(path, **options),
        "read_table of a column": lambda: reader.read_table(path, columns=["other"], **options),
        "dataset": lambda: reader.dataset(path.parent, **options).to_table(),
        "view": lambda: reader.view(path.parent, **options).open(path.name).read(),
        "decryption_properties": lambda: reader.decryption_properties(path, **options),
        "decrypt_file": lambda: reader.decrypt_file(path, target, **options),
        "rekey_file": lambda: reader.rekey_file(path, target, **options),
        "salvage_file": lambda: reader.salvage_file(path, target, **options),
    }


@layouts
@moves
def test_every_reader_refuses_it_before_the_kms_is_asked(tmp_path: Path, layout: str, move: str) -> None:
    path, target = attacked(tmp_path, layout, move), tmp_path / "target"
    before = path.read_bytes()
    length = len(MOVES[move].shown_unique)
    given: dict[str, Any] = {"aad_prefix": "t/part1"}
    for options in ({}, given):
        settings = LAYOUTS[layout] | ({"aad_prefix": None, "store_aad_prefix": True} if options else {})
        with tools(**settings) as reader:
            for name, read in readers(reader, path, target, **options).items():
                with pytest.raises(AadPrefixError, match=f"the file unique has {length} bytes, not 8") as caught:
                    read()
                assert "reading.file_unique_lengths" in str(caught.value), name
                assert "part1" in str(caught.value), name
            assert unwrapped(reader) == 0
            report = reader.rekey_in_place(path.parent, **options)
            assert isinstance(report.files[0].error, AadPrefixError)
    assert path.read_bytes() == before
    assert not target.exists()


@layouts
@moves
def test_verify_calls_it_a_violation(tmp_path: Path, layout: str, move: str) -> None:
    path = attacked(tmp_path, layout, move)
    length = len(MOVES[move].shown_unique)
    rule = "file-unique-length" if length else "file-unique"
    for settings in ({}, {"aad_prefix": None, "store_aad_prefix": True}):
        with tools(**LAYOUTS[layout] | settings) as reader:
            report = reader.verify_file(path)
            assert report.verdict is Verdict.VIOLATED
            assert rule in {result.rule.id for result in report.rules if result.outcome is Outcome.BROKEN}
            assert report.result("prefix-expected").outcome is not Outcome.HOLDS
            if length:
                assert f"it has {length} bytes" in report.result(rule).findings[0].message


@layouts
def test_the_honest_file_is_read(tmp_path: Path, layout: str) -> None:
    for number, prefix in enumerate((b"t/part1", b"t/part1\0")):
        path = tmp_path / str(number) / "part1"
        with tools(**LAYOUTS[layout]) as reader:
            write(reader, path, prefix)
            for name, read in readers(reader, path, tmp_path / f"target{number}").items():
                if name == "decryption_properties" and ("supplied" in layout or not DECRYPTS_IN_THREADS):
                    continue  # pyarrow takes no AAD prefix together with keys from a KMS.
                (tmp_path / f"target{number}").unlink(missing_ok=True)
                found = read()
                if isinstance(found, pa.Table):
                    assert found.column("other").to_pylist() == list(range(20))
            assert reader.verify_file(path).conforms
            assert reader.verify_file(path).result("prefix-expected").outcome is Outcome.HOLDS
    # Another prefix is neither of the two.
    with tools(**LAYOUTS[layout]) as reader, pytest.raises(DecryptionError):
        reader.read_table(path, aad_prefix="t/part")


def test_a_rotation_leaves_it_as_it_is(tmp_path: Path) -> None:
    path = attacked(tmp_path, "encrypted", "the end of a prefix")
    before = path.read_bytes()
    with tools() as reader:
        report = reader.rotate(path.parent, moves={"kc": "new"}, aad_prefix="t/part1")
        (result,) = report.files
        assert isinstance(result.error, AadPrefixError)
        assert "9 bytes, not 8" in str(result.error)
        (listed,) = reader.key_inventory(path, aad_prefix="t/part1")
        assert isinstance(listed.unknown, AadPrefixError)
        assert unwrapped(reader) == 0
    assert path.read_bytes() == before


@pytest.mark.parametrize("layout", ["encrypted", "signed", "external", "supplied", "supplied, signed"])
@pytest.mark.parametrize("prefix", [b"t/part1", b"t/part1\0"])
def test_files_of_both_forms_keep_theirs_through_rotation_and_rekey(
    tmp_path: Path, layout: str, prefix: bytes
) -> None:
    settings = LAYOUTS[layout] | {"also_trusted": ["new"]}
    path = tmp_path / "set" / "part1"
    with tools(**settings) as keytools:
        write(keytools, path, prefix)
        fields = aad_fields(path)
        assert fields == (None if "supplied" in layout else prefix, UNIQUE, "supplied" in layout)
        report = keytools.rotate(path.parent, moves={"kc": "new"})
        assert [(file.outcome.value, file.error) for file in report.files] == [("rotated", None)]
        assert aad_fields(path) == fields
        assert keytools.read_table(path).equals(data())
        uses = {use.master_key_id for file in keytools.key_inventory(path) for use in file.uses}
        assert uses == {"kf", "new"}
        rekeyed = keytools.rekey_in_place(path.parent)
        assert rekeyed.files[0].error is None
        shown, unique, supply = aad_fields(path)
        assert (shown, supply) == (fields[0], fields[2])
        assert unique is not None and len(unique) == 8 and unique != UNIQUE
        assert keytools.read_table(path).equals(data())
        (opened,) = key_service(keytools).open_files([_location(path)], None, None)
        assert opened.footer.aad_prefix == prefix


def _location(path: Path) -> Any:
    from parquet_keytools.storage.locations import FileLocation

    return FileLocation.resolve(path)


@pytest.mark.parametrize("layout", ["encrypted", "signed", "external", "supplied"])
def test_a_file_of_before_gets_the_delimiter_with_its_new_table(tmp_path: Path, layout: str) -> None:
    tables = {
        "t": document(**LAYOUTS[layout])["tables"]["t"],
        "u": document(**LAYOUTS[layout], aad_prefix="u/{file_name}")["tables"]["t"],
    }
    path, target = tmp_path / "set" / "part1", tmp_path / "other" / "part1"
    target.parent.mkdir()
    with tools(tables=tables) as keytools:
        write(keytools, path, b"t/part1", table_name="t")
        keytools.rekey_file(path, target, table_name="t", new_table_name="u")
        assert keytools.read_table(target, table_name="u").equals(data())
        report = keytools.rekey_in_place(path.parent, table_name="t", new_table_name="u")
        assert report.files[0].error is None
        for made in (path, target):
            shown, unique, supply = aad_fields(made)
            assert (shown, supply) == ((None, True) if layout == "supplied" else (b"u/part1\0", False))
            assert unique is not None and len(unique) == 8
            (opened,) = key_service(keytools).open_files([_location(made)], "u", None)
            assert opened.footer.aad_prefix == b"u/part1\0"


@layouts
def test_what_is_written_ends_in_nul(tmp_path: Path, layout: str) -> None:
    with tools(**LAYOUTS[layout]) as keytools:
        keytools.write_table(data(), tmp_path / "a")
        keytools.write_dataset(data(), tmp_path / "set")
        pq.write_table(data(), tmp_path / "plain")
        keytools.encrypt_file(tmp_path / "plain", tmp_path / "b")
        paths = [tmp_path / "a", tmp_path / "b", *(tmp_path / "set").glob("*.parquet")]
        assert len(paths) == 3
        for path in paths:
            (opened,) = key_service(keytools).open_files([_location(path)], None, None)
            assert opened.footer.aad_prefix == delimited_prefix(f"t/{path.name}")
            assert len(opened.footer.envelope.aad_file_unique or b"") == 8
            assert keytools.read_table(path, aad_prefix=f"t/{path.name}").equals(data())


@pytest.mark.parametrize("prefix", [b"\xff\x00\x80 no text", b"t/part1", b"ends in\0"])
@pytest.mark.parametrize("is_stored", [True, False])
def test_a_prefix_of_bytes_in_every_reader(prefix: bytes, is_stored: bool, tmp_path: Path) -> None:
    path, target = tmp_path / "part1", tmp_path / "target"
    text = "base64:" + base64.b64encode(prefix).decode()
    # The table gives it in the text form.
    with tools(aad_prefix=text, store_aad_prefix=is_stored) as keytools:
        keytools.write_table(data(), path)
        (opened,) = key_service(keytools).open_files([_location(path)], None, None)
        assert opened.footer.aad_prefix == prefix.removesuffix(b"\0") + b"\0"
        assert keytools.read_table(path).equals(data())
        assert keytools.verify_file(path).conforms
    # Another writer's file, without our delimiter, and the caller says so.
    with tools(aad_prefix=None, store_aad_prefix=True) as keytools:
        for given in (prefix, text):
            write(keytools, path, prefix)
            for read in readers(keytools, path, target, aad_prefix=given).values():
                read()
                target.unlink(missing_ok=True)
            assert keytools.inspect_file(path, aad_prefix=given).footer_is_authentic
            assert keytools.verify_file(path, aad_prefix=given).conforms
            assert keytools.key_inventory(path, aad_prefix=given)
            assert keytools.rotate(path, aad_prefix=given).succeeded
            for name, read in readers(keytools, path, target, aad_prefix=b"\xff another").items():
                with pytest.raises(AadPrefixError):
                    read()
                assert not target.exists(), name


def test_a_prefix_of_bytes_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text(json.dumps(document(aad_prefix=None, store_aad_prefix=True)))
    with tools(aad_prefix=None, store_aad_prefix=True) as keytools:
        write(keytools, tmp_path / "part1", b"\xff\x00\x80")
    arguments = ["verify", str(tmp_path / "part1"), "--config", str(tmp_path / "keys.yaml"), "--aad-prefix"]
    assert CliRunner().invoke(app, [*arguments, "base64:/wCA"]).exit_code == 0
    assert CliRunner().invoke(app, [*arguments, "base64:/wCB"]).exit_code == 1
    refused = CliRunner().invoke(app, [*arguments, "base64:no"])
    assert refused.exit_code == 2 and "not base64" in refused.output
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "part1"), "--json"])
    assert json.loads(shown.stdout)["aad_prefix"] == "base64:/wCA"


def test_a_given_prefix_is_a_text_without_nul(tmp_path: Path) -> None:
    path = tmp_path / "part1"
    with tools() as keytools:
        write(keytools, path, b"t/part1\0")
        for text, message in (("t/part1\0", "contains NUL"), ("", "an empty AAD prefix")):
            for name, read in readers(keytools, path, tmp_path / "target", aad_prefix=text).items():
                with pytest.raises(AadPrefixError, match=message):
                    read()
                assert not (tmp_path / "target").exists(), name
            with pytest.raises(AadPrefixError, match=message):
                keytools.verify_file(path, aad_prefix=text)
        assert unwrapped(keytools) == 0


@pytest.mark.parametrize("layout", ["encrypted", "signed", "supplied", "supplied, signed"])
@pytest.mark.parametrize("prefix", [b"t/part1", b"t/part1\0"])
def test_what_only_looks_at_a_file_knows_both_forms(tmp_path: Path, layout: str, prefix: bytes) -> None:
    path = tmp_path / "part1"
    with tools(**LAYOUTS[layout]) as keytools:
        write(keytools, path, prefix)
        assert keytools.inspect_file(path).footer_is_authentic is True
        assert keytools.inspect_file(path, aad_prefix="t/part1").footer_is_authentic is True
        assert keytools.kms is not None
        columns = check_columns(keytools.configuration, _location(path), None, None, keytools.kms)
        assert [column.dotted_path for column in columns] == ["name", "other"]
        columns = check_columns(keytools.configuration, _location(path), None, "t/part1", keytools.kms)
        assert [column.dotted_path for column in columns] == ["name", "other"]
        if layout == "encrypted":
            with pytest.raises(AadPrefixError, match="another AAD prefix"):
                check_columns(keytools.configuration, _location(path), None, "t/part10", keytools.kms)


def test_files_of_both_forms_are_one_data_set(tmp_path: Path) -> None:
    """The delimiter is not part of the name: it neither hides a gap nor splits one prefix into two."""
    with tools(aad_prefix="t/{file_name}") as keytools:
        for number, end in ((0, b""), (1, b"\0"), (3, b"")):
            name = f"part-{number}.parquet"
            write(keytools, tmp_path / "set" / name, b"t/" + name.encode() + end, bytes([number]) * 8)
        report = keytools.verify_folder(tmp_path / "set", part_count=4)
        (broken,) = [result for result in report.rules if result.outcome is Outcome.BROKEN]
        assert broken.rule.id == "part-missing"
        assert "of 4 parts, these are missing: 2." in broken.findings[0].message
    with tools(aad_prefix="t") as keytools:
        write(keytools, tmp_path / "shared" / "a.parquet", b"t", b"a" * 8)
        write(keytools, tmp_path / "shared" / "b.parquet", b"t\0", b"b" * 8)
        report = keytools.verify_folder(tmp_path / "shared")
        assert "prefix-shared" in {r.rule.id for r in report.rules if r.outcome is Outcome.BROKEN}


# --- foreign writers -------------------------------------------------------------------------------------------

ANY = {"file_unique_lengths": "any"}


@pytest.mark.parametrize("layout", ["encrypted", "signed", "supplied"])
@pytest.mark.parametrize("length", [1, 8, 12, 16])
def test_files_of_foreign_writers_are_read_where_that_is_allowed(tmp_path: Path, layout: str, length: int) -> None:
    path = tmp_path / "part1"
    settings = LAYOUTS[layout] | {"aad_prefix": "t/{file_name}/"}
    with tools(**settings) as writer:
        write(writer, path, b"t/part1/", b"u" * length)
        if length != 8:
            with pytest.raises(AadPrefixError, match=f"{length} bytes, not 8"):
                writer.read_table(path)
    with tools(**settings, reading=ANY) as reader:
        assert reader.read_table(path).equals(data())
        assert reader.read_table(path, aad_prefix="t/part1/").equals(data())
        reader.rekey_in_place(path)
        assert len(aad_fields(path)[1] or b"") == 8
        assert reader.read_table(path).equals(data())


def test_moved_bytes_are_refused_there_too(tmp_path: Path) -> None:
    path = tmp_path / "part1"
    with tools(aad_prefix="t/{file_name}/", reading=ANY) as reader:
        write(reader, path, b"t/part10/", bytes(12))
        present(path, b"t/part1", b"0/" + bytes(12))
        with pytest.raises(AadPrefixError, match="another AAD prefix"):
            reader.read_table(path)
        with pytest.raises(AadPrefixError, match="has to be the table"):
            reader.read_table(path, aad_prefix="t/part1")
        present(path, None, b"0/" + bytes(12), supply=True)
        for prefix in ("t/part1", "t/part1/", None):
            with pytest.raises(DecryptionError):
                reader.read_table(path, aad_prefix=prefix)
        assert reader.verify_file(path).verdict is Verdict.VIOLATED


def test_a_configuration_with_prefixes_that_begin_another_reads_nothing() -> None:
    with pytest.raises(KeytoolsError, match="may be the beginning of the prefix of another file"):
        tools(reading=ANY)


# --- the command line ------------------------------------------------------------------------------------------


def test_the_command_line(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from parquet_keytools.cli import app

    path = attacked(tmp_path, "encrypted", "the end of a prefix")
    config = tmp_path / "keys.yaml"
    config.write_text(json.dumps(document()))
    target = tmp_path / "out"

    def run(*arguments: object) -> Any:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    def text(done: Any) -> str:
        return " ".join((done.stdout + done.stderr).split())

    for command in (
        ("decrypt", path, target),
        ("decrypt", path, target, "--salvage"),
        ("rekey", path, target),
        ("decrypt", path.parent, tmp_path / "folder"),
        ("rekey", path.parent, "--in-place"),
        ("rotate", path, "--from", "kc", "--to", "new", "--aad-prefix", "t/part1"),
    ):
        done = run(*command, "--config", config)
        assert done.exit_code == 1, (command, text(done))
        assert "the file unique has 9 bytes, not 8" in text(done), command
        assert "reading.file_unique_lengths" in text(done), command
        assert not target.exists()
        assert not list(tmp_path.glob("folder/*"))
    done = run("verify", path, "--config", config)
    assert done.exit_code == 1
    assert "file-unique-length" in text(done)
    done = run("decrypt", path, target, "--config", config, "--aad-prefix", "")
    assert done.exit_code == 2
    assert "it is empty" in text(done)


def test_inspect_shows_where_a_prefix_ends(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from parquet_keytools.cli import app

    path = tmp_path / "part1"
    shown: dict[bytes, tuple[str, str, str]] = {}
    for prefix in (b"t/part1\0", b"t/part1", b"t/part1\\x00", b"t/part1\0\0", b"t/\xffpart1", b"t/\\xffpart1"):
        with tools() as keytools:
            write(keytools, path, prefix)
        fields = json.loads(CliRunner().invoke(app, ["inspect", str(path), "--json"]).stdout)
        drawn = CliRunner().invoke(app, ["inspect", str(path)]).output
        assert "\0" not in drawn
        line = next(line for line in drawn.splitlines() if "AAD prefix" in line)
        shown[prefix] = fields["aad_prefix"], fields["aad_prefix_escaped"], line
    # The first value can be given to a reader; the second one distinguishes any two prefixes.
    assert shown[b"t/part1\0"][:2] == ("t/part1", "t/part1\\x00")
    assert shown[b"t/part1"][:2] == ("t/part1", "t/part1")
    assert shown[b"t/part1\\x00"][1] == "t/part1\\\\x00"
    assert len({escaped for _, escaped, _ in shown.values()}) == len(shown)
    assert len({line for _, _, line in shown.values()}) == len(shown)
    assert all(escaped.isprintable() for _, escaped, _ in shown.values())


# --- who accepts it --------------------------------------------------------------------------------------------


def test_pyarrow_reads_part10_as_part1(tmp_path: Path) -> None:
    """The specification's own example (4.4.1), as described in docs/aad-prefix-boundary.md."""
    path, key = tmp_path / "part10", b"0123456789012345"
    properties = pe.create_encryption_properties(
        key, aad_prefix=b"employees_23May2018.part10", store_aad_prefix=False
    )
    pq.write_table(data(1000), path, encryption_properties=properties)
    prefix, unique, supply = aad_fields(path)
    assert (prefix, len(unique or b""), supply) == (None, 8, True)
    shutil.copy(path, tmp_path / "part1")
    present(tmp_path / "part1", None, b"0" + (unique or b""), supply=True)
    expected = pe.create_decryption_properties(key, aad_prefix=b"employees_23May2018.part1")
    assert pq.read_table(tmp_path / "part1", decryption_properties=expected).equals(data(1000))
    # Its own file does not read under the other name as long as no bytes are moved.
    with pytest.raises(OSError):
        pq.read_table(path, decryption_properties=expected)
    present(tmp_path / "part1", b"employees_23May2018.part1", b"0" + (unique or b""))
    assert pq.read_table(tmp_path / "part1", decryption_properties=expected).equals(data(1000))


# --- the other end of the file unique --------------------------------------------------------------------------


def _numbers(values: list[int]) -> pa.Table:
    return pa.table({"n": values}, schema=pa.schema([pa.field("n", pa.int64(), nullable=False)]))


_BARE = {"compression": "none", "use_dictionary": False, "write_statistics": False, "store_schema": False}


def forged(folder: Path, writer: Callable[[pa.Table, Path], object], wanted: list[int]) -> Path:
    """Return a file with metadata of the attacker's choice.

    The attacker has no key, chooses values that somebody encrypts with the footer key, and writes to the storage:
    a page of these values is the footer of the attacker's file.
    """
    plain = folder / "wanted"
    pq.write_table(_numbers(wanted), plain, **_BARE)
    content = plain.read_bytes()
    start = len(content) - 8 - struct.unpack("<I", content[-8:-4])[0]
    footer = content[start:-8]
    footer += bytes(-len(footer) % 8)
    victim = folder / "victim"
    writer(_numbers(list(struct.unpack(f"<{len(footer) // 8}q", footer))), victim)
    data = victim.read_bytes()
    found = data.index(struct.pack("<I", len(footer) + 28))
    page = data[found : found + 4 + len(footer) + 28]
    crypto, _ = FileCryptoMetaData.read(data[-8 - struct.unpack("<I", data[-8:-4])[0] : -8])
    parameters = crypto.encryption_algorithm.aes_gcm_v1
    assert parameters is not None and parameters.aad_file_unique is not None
    # A data page, row group 0, column 0, page 0; the last byte remains as the type of a footer.
    parameters.aad_file_unique += b"\2\0\0\0\0\0"
    body = crypto.serialise() + page
    path = folder / "forged" / "part1"
    path.parent.mkdir()
    path.write_bytes(b"PARE" + content[4:start] + body + struct.pack("<I", len(body)) + b"PARE")
    return path


def test_pyarrow_takes_a_data_page_for_a_footer(tmp_path: Path) -> None:
    key = b"0123456789012345"
    sealing = pe.create_encryption_properties(key)
    path = forged(tmp_path, lambda t, p: pq.write_table(t, p, encryption_properties=sealing, **_BARE), [666, 667])
    found = pq.read_table(path, decryption_properties=pe.create_decryption_properties(key))
    assert found["n"].to_pylist() == [666, 667]


@pytest.mark.parametrize("prefix", [None, "t", "{file_name}"])
def test_our_readers_do_not(tmp_path: Path, prefix: str | None) -> None:
    with tools(column_keys={}, aad_prefix=prefix) as reader:

        def write_one_page(table: pa.Table, path: Path) -> None:
            pq.write_table(table, tmp_path / "plain", **_BARE)
            reader.encrypt_file(tmp_path / "plain", path)

        path, target = forged(tmp_path, write_one_page, [666, 667]), tmp_path / "target"
        message = "14 bytes, not 8: the end of another prefix"
        if prefix is None:
            message = "14 bytes, not 8, and ends like the AAD of a data page"
        elif prefix == "{file_name}":
            message = "another AAD prefix"
        for name, read in readers(reader, path, target).items():
            with pytest.raises(DecryptionError, match=message):
                read()
            assert not target.exists(), name
        assert unwrapped(reader) == 0
        report = reader.verify_file(path)
        assert "file-unique-length" in {r.rule.id for r in report.rules if r.outcome is Outcome.BROKEN}
    # Nor without a table that forbids plaintext.
    with tools(tables={}) as reader:
        for read in readers(reader, path, target).values():
            with pytest.raises((DecryptionError, ConfigurationError)):
                read()
        with pytest.raises(DecryptionError, match="14 bytes, not 8, and ends like the AAD of a data page"):
            reader.decrypt_file(path, target)


@pytest.mark.parametrize("length", [0, 3, 6, 8, 11, 13, 14])
def test_nor_where_bytes_are_moved_to_the_prefix_then(tmp_path: Path, length: int) -> None:
    """This many of 14 bytes stay in the file unique; with 8 of them, the file looks like any other."""
    with tools(column_keys={}, aad_prefix=None) as writer:

        def write_one_page(table: pa.Table, path: Path) -> None:
            pq.write_table(table, tmp_path / "plain", **_BARE)
            writer.encrypt_file(tmp_path / "plain", path)

        path, target = forged(tmp_path, write_one_page, [666, 667]), tmp_path / "target"
        _, whole, _ = aad_fields(path)
        assert whole is not None
        present(path, whole[: 14 - length] or None, whole[14 - length :])
    for changes in ({"column_keys": {}, "aad_prefix": None, "unlisted_columns": "plaintext"}, {"tables": {}}):
        with tools(**changes) as reader:
            for name, read in readers(reader, path, target).items():
                if not (changes.get("tables") == {} and name.startswith("rekey")):
                    with pytest.raises(DecryptionError, match="a data page is in the place of the footer"):
                        read()
                    assert not target.exists(), name
            assert unwrapped(reader) == 0
            report = reader.verify_file(path)
            broken = {r.rule.id for r in report.rules if r.outcome is Outcome.BROKEN}
            assert ("footer-authentic" if length else "file-unique") in broken
            assert report.verdict is Verdict.VIOLATED


def test_nor_where_other_lengths_are_allowed(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"column_keys": {}, "aad_prefix": "t/", "reading": ANY}
    with tools(**settings) as writer:

        def write_one_page(table: pa.Table, path: Path) -> None:
            pq.write_table(table, tmp_path / "plain", **_BARE)
            writer.encrypt_file(tmp_path / "plain", path)

        path, target = forged(tmp_path, write_one_page, [666, 667]), tmp_path / "target"
    with tools(**settings, unlisted_columns="plaintext") as reader:
        for options in ({}, {"aad_prefix": "t/"}):
            for name, read in readers(reader, path, target, **options).items():
                with pytest.raises(DecryptionError, match="a data page is in the place of the footer"):
                    read()
                assert not target.exists(), name
        assert unwrapped(reader) == 0


@pytest.mark.parametrize("layout", ["encrypted", "supplied"])
def test_the_name_of_a_copy_does_not_choose_the_form_of_the_prefix(tmp_path: Path, layout: str) -> None:
    """`base64:` in a name would otherwise give a copy the prefix of the file that it was copied from."""
    with tools(aad_prefix="{file_name}", **LAYOUTS[layout]) as both:
        write(both, tmp_path / "part1", b"part1", UNIQUE)
        both.read_table(tmp_path / "part1")
        for prefix in (b"part1", b"part1\0"):
            copy = tmp_path / f"base64:{base64.b64encode(prefix).decode()}"
            shutil.copy(tmp_path / "part1", copy)
            with pytest.raises((AadPrefixError, DecryptionError)):
                both.read_table(copy)
            # A file that is written under such a name has this name as its prefix.
            both.write_table(data(), copy)
            both.read_table(copy)
