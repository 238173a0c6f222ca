"""Somebody who can write to the storage, while keys are rotated, listed and put back.

What lies in a data set, or beside its files, is never believed: not a journal, not a label, not key material that
no authentic footer refers to, not old keys. A rotation says "done" and `keys` says "not used" only of what was
proven.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fake_spark import FakeSpark
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import fs as pafs
from rotation_case import MASTER_KEYS, TABLE, Case, external_entries, key_material_file, names, tree_digest

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.errors import ConfigurationError, KeytoolsError, OutputError
from parquet_keytools.format.file_layout import MAGIC_ENCRYPTED_FOOTER, with_trailer
from parquet_keytools.format.structs import FileCryptoMetaData, FileMetaData
from parquet_keytools.kms.contract_tests import unwrap_one
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.rotation.journal import (
    FORMER_JOURNAL_NAME,
    KEPT_SECONDS,
    Journal,
    JournalUnsafeError,
    journal_folder,
)
from parquet_keytools.rotation.replaced_keys import SUFFIX, keep, new_rotation_id
from parquet_keytools.rotation.report import FileRotation, Outcome
from parquet_keytools.rotation.tail import footer_of, new_tail, read_tail
from parquet_keytools.storage.locations import FileLocation

every_key_material = pytest.mark.parametrize("key_material", ["internal", "external"])
every_footer = pytest.mark.parametrize("plaintext_footer", [False, True])
SOMEBODY_ELSE = 12_345


class CutOffError(BaseException):
    """Stands for the end of a process."""


def cut_off_after(count: int) -> Callable[[FileRotation], None]:
    seen: list[FileRotation] = []

    def on_file(result: FileRotation) -> None:
        seen.append(result)
        if len(seen) == count:
            raise CutOffError

    return on_file


def unknown_of(tools: Keytools, path: Path) -> Exception:
    """Return why the keys of a file are not all known; whether it needs some other key is unknown, too."""
    (file,) = tools.key_inventory(path)
    assert file.unknown is not None and file.depends_on("new") is not False
    assert [found.path for found in tools.files_using("new", path)] == [str(path)]
    return file.unknown


def replace_tail(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Replace a file from its footer on."""
    tail, _ = read_tail(FileLocation.resolve(path))
    path.write_bytes(path.read_bytes()[: tail.offset] + change(tail.data))


def kept_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.endswith(SUFFIX))


# --- journals ---


def test_a_journal_in_the_data_set_is_not_read(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore")
    path = case.write()
    case.add_version()
    planted = case.folder / FORMER_JOURNAL_NAME
    stat = path.stat()
    state = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns), None
    for content in (repr(state).encode(), b'{"rotation_journal":1}\n', b""):
        planted.write_bytes(content)
        report = case.tools().rotate(case.folder, older_than="1000000")
        assert report.counts == Counter({Outcome.ROTATED: 1})
        assert report.ignored_journal == str(planted) and planted.read_bytes() == content
    case.disable(1)
    assert case.tools().read_table(path).equals(TABLE)


@pytest.mark.parametrize("place", ["journal", "p=1/journal", "../link/journal", "../journal-link"])
def test_a_journal_is_not_put_into_the_data_set(tmp_path: Path, place: str) -> None:
    case = Case.make(tmp_path, "keystore")
    case.write("p=1/x.parquet")
    case.add_version()
    (tmp_path / "link").symlink_to(case.folder)
    (tmp_path / "journal-link").symlink_to(case.folder / "journal")
    before = tree_digest(case.folder)
    for act in (case.tools().rotate, case.tools().rekey_in_place):
        with pytest.raises(ConfigurationError, match=r"would lie in the data set .* outside of it"):
            act(case.folder, journal=case.folder / place)
    assert tree_digest(case.folder) == before


def test_a_journal_that_others_could_have_written_is_refused(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory")
    path = case.write()
    before = tree_digest(case.folder)
    journal = tmp_path / "journal"
    Journal(journal, {}).close(remove=False)
    content = journal.read_bytes()

    def linked() -> None:
        journal.rename(tmp_path / "elsewhere")
        journal.symlink_to(tmp_path / "elsewhere")

    spoilers: list[Callable[[], object]] = [
        lambda: journal.chmod(0o666),
        lambda: journal.chmod(0o620),
        lambda: os.link(journal, tmp_path / "another name"),
        linked,
        lambda: (journal.unlink(), os.mkfifo(journal)),
    ]
    if os.geteuid() == 0:
        spoilers.append(lambda: os.chown(journal, SOMEBODY_ELSE, -1))
    for spoil in spoilers:
        journal.unlink(missing_ok=True)
        (tmp_path / "another name").unlink(missing_ok=True)
        journal.write_bytes(content)
        journal.chmod(0o600)
        spoil()
        for act in (case.tools().rotate, case.tools().rekey_in_place):
            with pytest.raises(JournalUnsafeError, match=r"link|only this user"):
                act(case.folder, journal=journal)
        assert tree_digest(case.folder) == before, spoil
    assert case.tools().read_table(path).equals(TABLE)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes two users")
def test_a_folder_of_journals_that_somebody_else_made(tmp_path: Path, state_folder: Path) -> None:
    case = Case.make(tmp_path, "in_memory")
    case.write()
    with pytest.raises(CutOffError):
        case.tools().rotate(case.folder, on_file=cut_off_after(1))
    before = tree_digest(case.folder)
    folder = journal_folder()
    (journal,) = folder.iterdir()
    # Another process, of another user, copies what it may see and owns what it made.
    state_folder.chmod(0o777)
    for owned in (folder.parent, folder, journal):
        os.chown(owned, SOMEBODY_ELSE, -1)
        with pytest.raises(OutputError, match="only this user"):
            case.tools().rotate(case.folder)
        os.chown(owned, 0, -1)
    shutil.move(folder, tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    with pytest.raises(OutputError, match="only this user"):
        case.tools().rotate(case.folder)
    assert tree_digest(case.folder) == before


def test_journals_are_of_this_user_alone(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory")
    case.write()
    previous = os.umask(0)
    try:
        with pytest.raises(CutOffError):
            case.tools().rotate(case.folder, on_file=cut_off_after(1))
    finally:
        os.umask(previous)
    (journal,) = journal_folder().iterdir()
    modes = {path: path.stat().st_mode & 0o777 for path in (journal, journal.parent, journal.parent.parent)}
    assert list(modes.values()) == [0o600, 0o700, 0o700], modes


def test_journals_that_nobody_goes_on_with_are_removed(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory")
    case.write()
    with pytest.raises(CutOffError):
        case.tools().rotate(case.folder, on_file=cut_off_after(1))
    folder, secret = journal_folder(), tmp_path / "secret"
    (own,) = folder.iterdir()
    secret.write_text("stays")
    old = time.time() - KEPT_SECONDS - 60
    (folder / "recent.jsonl").touch(0o600)
    (folder / "not mine.txt").touch(0o600)
    (folder / "link.jsonl").symlink_to(secret)
    for name in ("stale.jsonl", "shared.jsonl", "in use.jsonl", "other.jsonl"):
        (folder / name).touch(0o600)
    (folder / "shared.jsonl").chmod(0o666)
    in_use = Journal(folder / "in use.jsonl", {"of": "another run"})
    for path in (*folder.glob("*.jsonl"), folder / "not mine.txt"):
        os.utime(path, (old, old), follow_symlinks=False)
    os.utime(folder / "recent.jsonl")
    # Of another data set: only what is surely a journal of this user that no run has now goes.
    (tmp_path / "other").mkdir()
    other = Case.make(tmp_path / "other", "in_memory")
    other.write()
    assert other.tools().rotate(other.folder).succeeded
    left = {"in use.jsonl", "link.jsonl", "not mine.txt", "recent.jsonl", "shared.jsonl"}
    assert {path.name for path in folder.iterdir()} == left
    assert secret.read_text() == "stays"
    in_use.close(remove=True)
    # The run that was cut off begins again.
    assert not own.exists()
    assert case.tools().rotate(case.folder).counts == Counter({Outcome.ROTATED: 1})


def test_an_old_journal_of_this_very_run_is_used(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory")
    for name in ("a.parquet", "b.parquet"):
        case.write(name)
    with pytest.raises(CutOffError):
        case.tools().rotate(case.folder, on_file=cut_off_after(1))
    (own,) = journal_folder().iterdir()
    old = time.time() - KEPT_SECONDS - 60
    os.utime(own, (old, old))
    assert case.tools().rotate(case.folder).counts[Outcome.FINISHED_BEFORE] == 1


def test_a_home_that_is_read_only_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.make(tmp_path, "keystore")
    case.write()
    case.add_version()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file" / "state"))
    report = case.tools().rotate(case.folder)
    assert report.counts == Counter({Outcome.ROTATED: 1}) and "cannot be made" in report.no_journal


def test_a_user_without_a_home_rotates_without_a_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.make(tmp_path, "keystore")
    case.write()
    case.add_version()
    for name in ("XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)
    report = case.tools().rotate(case.folder)
    assert report.counts == Counter({Outcome.ROTATED: 1}) and "no home folder" in report.no_journal


@every_key_material
def test_an_old_file_with_its_old_times_is_not_taken_for_finished(tmp_path: Path, key_material: str) -> None:
    case = Case.make(tmp_path, "in_memory", key_material=key_material)
    paths = [case.write(f"{number}.parquet") for number in range(3)]
    old = {path: (path.read_bytes(), path.stat()) for path in case.folder.iterdir()}
    with pytest.raises(CutOffError):
        case.tools().rotate(case.folder, on_file=cut_off_after(2))
    for path, (content, stat) in old.items():
        if path.name.removeprefix("_KEY_MATERIAL_FOR_").startswith("0"):
            path.write_bytes(content)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    report = case.tools().rotate(case.folder)
    assert report.files[0].outcome is Outcome.ROTATED
    assert report.counts[Outcome.FINISHED_BEFORE] == 1 and report.succeeded
    assert all(case.tools().read_table(path).equals(TABLE) for path in paths)


@every_key_material
def test_a_rekeyed_file_that_was_put_back_is_rekeyed_again(tmp_path: Path, key_material: str) -> None:
    case = Case.make(tmp_path, "in_memory", key_material=key_material)
    for name in ("0.parquet", "1.parquet"):
        case.write(name)
    old = {path: path.read_bytes() for path in case.folder.iterdir()}
    journal = tmp_path / "journal"

    def stop_after_first(result: Any) -> None:
        raise CutOffError

    with pytest.raises(CutOffError):
        case.tools().rekey_in_place(case.folder, journal=journal, on_file=stop_after_first)
    rekeyed = {path: path.read_bytes() for path in case.folder.iterdir()}
    for path, content in old.items():
        path.write_bytes(content)
    report = case.tools().rekey_in_place(case.folder, journal=journal, on_file=lambda _: None)
    assert {outcome.value: number for outcome, number in report.counts.items()} == {"rekeyed": 2}
    # What that run made itself is finished, wherever it comes from.
    assert not journal.exists()
    with pytest.raises(CutOffError):
        case.tools().rekey_in_place(case.folder, journal=journal, on_file=stop_after_first)
    assert rekeyed.keys() == old.keys()
    report = case.tools().rekey_in_place(case.folder, journal=journal)
    assert {outcome.value: number for outcome, number in report.counts.items()} == {
        "rekeyed": 1,
        "finished before": 1,
    }


# --- labels ---


def relabel(data: bytes) -> bytes:
    """Say of all that the first version wrapped that the second one did."""
    assert b"keystore:v1:" in data
    return data.replace(b"keystore:v1:", b"keystore:v2:")


@every_key_material
@every_footer
@pytest.mark.parametrize("double", [True, False])
def test_a_label_of_a_version_is_not_believed(
    tmp_path: Path, key_material: str, plaintext_footer: bool, double: bool
) -> None:
    settings: dict[str, Any] = {
        "key_material": key_material,
        "plaintext_footer": plaintext_footer,
        "double_wrapping": double,
    }
    case = Case.make(tmp_path, "keystore", **settings)
    path = case.write()
    case.add_version()
    if key_material == "internal":
        replace_tail(path, relabel)
    else:
        material = key_material_file(path)
        material.write_bytes(relabel(material.read_bytes()))
    before = tree_digest(case.folder)
    for options in ({}, {"dry_run": True}, {"older_than": "2"}, {"only_master_keys": ["kf"]}):
        (file,) = case.tools().rotate(case.folder, **options).files
        assert file.outcome is Outcome.FAILED and file.path == str(path), options
    assert tree_digest(case.folder) == before
    assert type(unknown_of(case.tools(), path)).__name__ in ("WrappedKeyInvalidError", "FooterSignatureError")


@every_footer
@pytest.mark.parametrize("reference", ["footerKey", "columnKey0", "columnKey3"])
@pytest.mark.parametrize("change", [{"masterKeyID": "new"}, {"wrappedKEK": "v2"}, {"wrappedDEK": "other"}])
def test_an_entry_that_was_changed_is_not_believed(
    tmp_path: Path, plaintext_footer: bool, reference: str, change: dict[str, str]
) -> None:
    case = Case.make(tmp_path, "keystore", key_material="external", plaintext_footer=plaintext_footer)
    path = case.write()
    case.add_version()
    entries = external_entries(path)
    fields = entries[reference]
    for name, value in change.items():
        if name == "masterKeyID":
            fields[name] = value
        elif name == "wrappedKEK":
            fields[name] = relabel(fields[name].encode()).decode()
        else:
            # Of another column: the KEK is right, and the DEK is that of nobody here.
            others = [other for other in entries if other != reference and other.startswith("column")]
            same_kek = [o for o in others if entries[o]["wrappedKEK"] == fields["wrappedKEK"]]
            fields[name] = entries[(same_kek or others)[0]][name]
    key_material_file(path).write_text(json.dumps({name: json.dumps(entry) for name, entry in entries.items()}))
    before = tree_digest(case.folder)
    outcomes = {
        options: case.tools().rotate(case.folder, only_master_keys=list(options) or None).files[0].outcome
        for options in ((), ("kf",), ("ka",), ("kb",), ("new",))
    }
    assert set(outcomes.values()) == {Outcome.FAILED}, outcomes
    assert tree_digest(case.folder) == before
    unknown_of(case.tools(), path)


def test_the_new_key_of_a_footer_does_not_vouch_for_old_keys_of_columns(tmp_path: Path) -> None:
    """The key metadata of the footer stands before the encrypted footer: it goes with an older one, too."""
    case = Case.make(tmp_path, "keystore")
    path = case.write()
    tail, _ = read_tail(FileLocation.resolve(path))
    old = footer_of(tail.data)
    _, old_end = FileCryptoMetaData.read(old)
    case.add_version()
    assert case.tools().rotate(path).succeeded

    def with_old_module(new: bytes) -> bytes:
        _, end = FileCryptoMetaData.read(footer_of(new))
        return with_trailer(new[:end] + old[old_end:], b"PARE")

    replace_tail(path, with_old_module)
    used = {(use.master_key_id, use.version) for file in case.tools().key_inventory(path) for use in file.uses}
    assert used == {("kf", "2"), ("ka", "1"), ("kb", "1")}
    (file,) = case.tools().rotate(path).files
    assert file.outcome is Outcome.ROTATED
    case.disable(1)
    assert case.tools().read_table(path).equals(TABLE)


def test_a_footer_that_denies_its_encryption(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore", plaintext_footer=True)
    path = case.write()
    case.add_version()

    def denied(tail: bytes) -> bytes:
        metadata, _ = FileMetaData.read(footer_of(tail))
        metadata.encryption_algorithm = None
        metadata.footer_signing_key_metadata = None
        return with_trailer(metadata.serialise(), b"PAR1")

    replace_tail(path, denied)
    before = tree_digest(case.folder)
    (file,) = case.tools().rotate(case.folder).files
    assert file.outcome is Outcome.FAILED and str(path) in str(file.error)
    unknown_of(case.tools(), path)
    assert [found.is_encrypted for found in case.tools().key_inventory(path)] == [True]
    assert tree_digest(case.folder) == before


# --- key material that no footer refers to ---


def stash(case: Case, path: Path) -> str:
    """Put the key of another data set into a key material file; return its wrapped key."""
    stolen = case.write("../stolen.parquet", tools=case.tools(key_material="external"))
    text = json.loads(key_material_file(stolen).read_text())["columnKey0"]
    material = key_material_file(path)
    texts = json.loads(material.read_text())
    material.write_text(json.dumps({"stash": text, **texts, "columnKey99": text}))
    return str(json.loads(text)["wrappedKEK"])


@every_footer
@pytest.mark.parametrize("older_than", [None, "9"])
def test_a_key_that_was_stashed_dies_with_its_master_key(
    tmp_path: Path, plaintext_footer: bool, older_than: str | None
) -> None:
    case = Case.make(tmp_path, "keystore", key_material="external", plaintext_footer=plaintext_footer)
    path = case.write()
    references = set(external_entries(path))
    wrapped = stash(case, path)
    case.add_version()
    before = case.kms.call_counts
    foreseen = case.tools().rotate(case.folder, dry_run=True, older_than=older_than)
    assert "2 entries of the key material file dropped" in foreseen.files[0].how
    (file,) = case.tools().rotate(case.folder, older_than=older_than).files
    assert file.outcome is Outcome.ROTATED and "2 entries of the key material file dropped" in file.how
    asked = case.kms.call_counts - before
    assert asked["rewrap"] == 3
    assert set(external_entries(path)) == references
    case.disable(1)
    assert case.tools().read_table(path).equals(TABLE)
    with pytest.raises(KeytoolsError):
        unwrap_one(case.kms, wrapped, "ka")


def test_what_is_nobodys_is_dropped_where_nothing_else_is_to_do(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "keystore", key_material="external")
    path = case.write()
    whole = external_entries(path)
    stash(case, path)
    assert [file.path for file in case.tools().files_using("ka", path)] == [str(path)]
    (file,) = case.tools().rotate(case.folder, keep_old=True).files
    assert file.outcome is Outcome.ROTATED and file.keys == () and external_entries(path) == whole
    assert case.tools().rotate(case.folder).counts == Counter({Outcome.ALREADY_CURRENT: 1})
    # Nor does it come back.
    assert case.tools().undo_rotation(path).counts == Counter({Outcome.RESTORED: 1})
    assert external_entries(path) == whole


@pytest.mark.parametrize("seconds_ago", [0, 2 * 3600, None])
def test_elsewhere_a_writer_on_another_machine_may_need_it_yet(tmp_path: Path, seconds_ago: int | None) -> None:
    """Key material is written before the file that refers to it: without its entries that file would be lost."""
    case = Case.make(tmp_path, "keystore", key_material="external")
    path = case.write()
    stash(case, path)
    store: Any = MemoryFileSystem()
    store.store.clear()
    if seconds_ago is not None:
        store = pafs._MockFileSystem(datetime.now(UTC) - timedelta(seconds=seconds_ago))
    location = FileLocation.resolve("data", store)
    location.filesystem.create_dir(location.path)
    for file in (path, key_material_file(path)):
        with location.filesystem.open_output_stream(f"{location.path}/{file.name}") as out:
            out.write(file.read_bytes())
    assert (location.child(path.name).info().mtime is None) == (seconds_ago is None)
    case.add_version()
    (rotated,) = case.tools().rotate("data", filesystem=store).files
    assert rotated.outcome is Outcome.ROTATED
    assert ("2 entries of the key material file dropped" in rotated.how) == (seconds_ago == 2 * 3600)
    with location.filesystem.open_input_stream(f"{location.path}/{key_material_file(path).name}") as content:
        assert ({"stash", "columnKey99"} <= json.loads(content.read()).keys()) == (seconds_ago != 2 * 3600)


def test_in_spark_no_task_has_it_re_wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from parquet_keytools.spark.pipelines import inspection, rotation

    keys = {name: base64.b64encode(name.encode().ljust(32)).decode() for name in MASTER_KEYS}
    kms = InMemoryKms({name: base64.b64decode(key) for name, key in keys.items()})
    case = Case(tmp_path / "data", kms, None, {"column_keys": {"ka": ["a"]}, "key_material": "external"})
    case.folder.mkdir()
    path = case.write()
    stash(case, path)
    config = tmp_path / "config.yaml"
    table = {"footer_key": "kf", **case.settings}
    config.write_text(
        json.dumps({"version": 1, "kms": {"type": "in_memory", "keys": keys}, "tables": {"t": table}})
    )
    rewrapped: list[str] = []
    rewrap = InMemoryKms._rewrap

    def counted(self: InMemoryKms, request: Any) -> str:
        rewrapped.append(request.wrapped_key)
        return rewrap(self, request)

    monkeypatch.setattr(InMemoryKms, "_rewrap", counted)
    spark: Any = FakeSpark([2], spark_master="local[2]")
    assert rotation.rotate(spark, case.folder, config).outcomes == {"rotated": 1}
    assert len(rewrapped) == 2 and set(external_entries(path)) == {"footerKey", "columnKey0"}
    # A forged entry is no answer, either.
    entries = external_entries(path)
    entries["columnKey0"]["masterKeyID"] = "kb"
    key_material_file(path).write_text(json.dumps({name: json.dumps(entry) for name, entry in entries.items()}))
    assert inspection.keys(spark, case.folder, config).outcomes == {"not all keys can be seen": 1}
    assert rotation.rotate(spark, case.folder, config, only_master_keys=["kf"]).outcomes == {"failed": 1}


# --- old keys ---


def plant(path: Path, kind: Any, offset: int, old: bytes, new: bytes) -> Path:
    """Put what looks like old keys beside a file, newer than all that are there."""
    location = FileLocation.resolve(path)
    kept = keep(location, location, kind, offset, old, new, f"9{new_rotation_id()[1:]}")
    return Path(kept.path)


@every_footer
def test_old_keys_of_another_file_are_not_put_back(tmp_path: Path, plaintext_footer: bool) -> None:
    case = Case.make(tmp_path, "keystore", plaintext_footer=plaintext_footer)
    path, other = case.write("x.parquet"), case.write("y.parquet")
    tools = case.tools()
    original = path.read_bytes()
    tail, _ = read_tail(FileLocation.resolve(path))
    foreign, _ = read_tail(FileLocation.resolve(other))
    planted = plant(path, "tail", tail.offset, foreign.data, tail.data)
    before = tree_digest(case.folder)
    (file,) = tools.undo_rotation(path).files
    assert file.outcome is Outcome.FAILED and str(planted) in str(file.error)
    assert tree_digest(case.folder) == before
    # Nor do they keep the true ones from being put back.
    planted.unlink()
    case.add_version()
    assert tools.rotate(path, keep_old=True).succeeded
    tail, _ = read_tail(FileLocation.resolve(path))
    planted = plant(path, "tail", tail.offset, foreign.data, tail.data)
    (file,) = tools.undo_rotation(path).files
    assert file.outcome is Outcome.RESTORED and str(planted) in file.how
    assert path.read_bytes() == original and kept_files(case.folder) == [planted]


@pytest.mark.parametrize(
    "forgery", ["foreign", "other column", "missing", "relabelled", "no JSON", "no footer key"]
)
def test_old_key_material_that_is_not_the_files_is_not_put_back(tmp_path: Path, forgery: str) -> None:
    case = Case.make(tmp_path, "keystore", key_material="external")
    path, other = case.write("x.parquet"), case.write("y.parquet")
    tools = case.tools()
    case.add_version()
    assert tools.rotate(path).succeeded
    now = key_material_file(path).read_bytes()
    texts = json.loads(now)
    if forgery == "foreign":
        forged = key_material_file(other).read_bytes()
    elif forgery == "no JSON":
        forged = b"{"
    else:
        if forgery == "other column":
            texts["columnKey0"], texts["columnKey1"] = texts["columnKey1"], texts["columnKey0"]
        elif forgery == "missing":
            del texts["columnKey2"]
        elif forgery == "no footer key":
            # All its keys are right, and no reader takes it.
            texts["footerKey"] = json.dumps({**json.loads(texts["footerKey"]), "isFooterKey": False})
        else:
            texts["columnKey3"] = texts["columnKey3"].replace("keystore:v2:", "keystore:v1:")
        forged = json.dumps(texts).encode()
    planted = plant(path, "key_material", 0, forged, now)
    before = tree_digest(case.folder)
    (file,) = tools.undo_rotation(path).files
    assert file.outcome is Outcome.FAILED and str(planted) in str(file.error)
    assert tree_digest(case.folder) == before
    assert case.tools().read_table(path).equals(TABLE)


@every_key_material
def test_old_keys_are_no_links(tmp_path: Path, key_material: str) -> None:
    case = Case.make(tmp_path, "keystore", key_material=key_material)
    path, tools = case.write(), case.tools()
    case.add_version()
    assert tools.rotate(path, keep_old=True).succeeded
    (kept,) = kept_files(case.folder)
    elsewhere = kept.rename(tmp_path / "elsewhere")
    kept.symlink_to(elsewhere)
    before = tree_digest(case.folder)
    (file,) = tools.undo_rotation(path).files
    assert file.outcome is Outcome.FAILED and "not a regular file" in str(file.error)
    assert str(kept) in str(file.error)
    left: list[tuple[str, str]] = []
    assert tools.drop_old_keys(path, on_left=lambda *found: left.append(found)) == 0
    assert left == [(str(kept), "it is not a regular file")]
    kept.unlink()
    kept.write_text("my notes")
    assert tools.drop_old_keys(path, on_left=lambda *found: left.append(found)) == 0
    assert left[1:] == [(str(kept), "it is named like old keys, and holds none")]
    assert (
        kept.read_text() == "my notes" and elsewhere.exists() and tree_digest(case.folder).keys() == before.keys()
    )


def test_no_link_leads_to_old_keys_of_another_data_set(tmp_path: Path) -> None:
    """Whoever may write to one data set would have the rotation of another one undone with its own."""
    case = Case.make(tmp_path, "keystore")
    case.write()
    other = tmp_path / "other"
    shutil.copytree(case.folder, other)
    case.add_version()
    tools = case.tools()
    assert tools.rotate(case.folder, keep_old=True).succeeded and tools.rotate(other, keep_old=True).succeeded
    before = tree_digest(other)
    (case.folder / "linked").symlink_to(other)
    report = tools.undo_rotation(case.folder)
    assert report.counts == {Outcome.RESTORED: 1, Outcome.FAILED: 1} and not report.succeeded
    (error,) = [file.error for file in report.files if file.error is not None]
    assert "behind a link" in str(error) and str(other) in str(error.hint)
    left: list[tuple[str, str]] = []
    assert tools.drop_old_keys(case.folder, on_left=lambda *found: left.append(found)) == 0
    assert tools.drop_old_keys(case.folder) == 0
    assert [why for _, why in left] == ["it lies in another folder than the one that was named, behind a link"]
    assert tree_digest(other) == before
    assert tools.undo_rotation(other).succeeded


def test_a_kept_tail_changes_nothing_but_keys(tmp_path: Path) -> None:
    """Bytes between the data and the old footer would be data to nobody, and are refused all the same."""
    case = Case.make(tmp_path, "keystore")
    path, tools = case.write(), case.tools()
    tail, _ = read_tail(FileLocation.resolve(path))
    for old in (b"x" * 50 + tail.data, tail.data[5:], tail.data[:-8], b"", b"PARE" * 20):
        planted = plant(path, "tail", tail.offset, old, tail.data)
        before = tree_digest(case.folder)
        (file,) = tools.undo_rotation(path).files
        assert file.outcome is Outcome.FAILED and str(planted) in str(file.error), old[:20]
        assert tree_digest(case.folder) == before
        planted.unlink()
    for offset in (0, tail.offset - 1, tail.offset + 1, 1 << 62, -1):
        planted = plant(path, "tail", offset, tail.data, tail.data)
        assert tools.undo_rotation(path).counts == Counter({Outcome.FAILED: 1})
        planted.unlink()
    assert names(case.folder) == [path.name]


@every_footer
def test_an_authentic_footer_that_says_something_else_is_not_put_back(
    tmp_path: Path, plaintext_footer: bool
) -> None:
    """As one of an earlier write with the same keys does: it would be other data to readers."""
    case = Case.make(tmp_path, "keystore", plaintext_footer=plaintext_footer)
    path, tools = case.write(), case.tools()
    tail, _ = read_tail(FileLocation.resolve(path))
    (opened,) = tools._keys.open_files([FileLocation.resolve(path)])
    opened.footer.metadata.num_rows -= 1
    planted = plant(path, "tail", tail.offset, new_tail(tail, opened.footer, {}), tail.data)
    before = tree_digest(case.folder)
    (file,) = tools.undo_rotation(path).files
    assert file.outcome is Outcome.FAILED and str(planted) in str(file.error)
    assert "is not that of the file" in str(file.error)
    assert tree_digest(case.folder) == before


def test_old_keys_that_say_another_algorithm_are_not_put_back(tmp_path: Path) -> None:
    """What comes before an encrypted footer is not authenticated, and the footer opens: no page would."""
    case = Case.make(tmp_path, "keystore")
    path, tools = case.write(), case.tools()
    tail, _ = read_tail(FileLocation.resolve(path))
    crypto_metadata, end = FileCryptoMetaData.read(footer_of(tail.data))
    algorithm = crypto_metadata.encryption_algorithm
    algorithm.aes_gcm_ctr_v1, algorithm.aes_gcm_v1 = algorithm.aes_gcm_v1, None
    relabelled = with_trailer(crypto_metadata.serialise() + footer_of(tail.data)[end:], MAGIC_ENCRYPTED_FOOTER)
    planted = plant(path, "tail", tail.offset, relabelled, tail.data)
    before = tree_digest(case.folder)
    (file,) = tools.undo_rotation(path).files
    assert file.outcome is Outcome.FAILED and str(planted) in str(file.error)
    assert tree_digest(case.folder) == before


# --- moves to master keys that others may use ---


@every_key_material
@every_footer
@pytest.mark.parametrize("where", ["moves", "another KMS"])
def test_a_file_of_another_table_is_not_moved(
    tmp_path: Path, key_material: str, plaintext_footer: bool, where: str
) -> None:
    """Tables share the master key of footers, and somebody copied a file of one into the folder of the other."""
    case = Case.make(
        tmp_path, "in_memory", key_material=key_material, plaintext_footer=plaintext_footer, aad_prefix="logs"
    )
    own = case.write("own.parquet")
    foreign = {
        "of another prefix": case.tools(aad_prefix="customers"),
        "under other column keys": case.tools(column_keys={"kb": ["a", "nested"], "ka": ["b"]}),
        "under another footer key": case.tools(footer_key="kb"),
        "with a column in plaintext": case.tools(column_keys={"ka": ["a", "nested"]}),
    }
    paths = [case.write(f"{name}.parquet", tools=tools) for name, tools in foreign.items()]
    before = tree_digest(case.folder)
    options: dict[str, Any] = (
        {"moves": {"kf": "new"}} if where == "moves" else {"to": InMemoryKms(dict.fromkeys(MASTER_KEYS))}
    )
    for table_name in (None, "t"):
        dry = case.tools().rotate(case.folder, table_name=table_name, dry_run=True, **options)
        assert {file.path for file in dry.failures} == set(map(str, paths))
    report = case.tools().rotate(case.folder, **options)
    outcomes = {Path(file.path): file for file in report.files}
    assert outcomes[own].outcome is Outcome.ROTATED
    for path in paths:
        assert outcomes[path].outcome is Outcome.FAILED and str(path) in str(outcomes[path].error), path
    changed = {name for name, digest in tree_digest(case.folder).items() if before.get(name) != digest}
    assert all("own" in name for name in changed)
    # A run that goes on finds what is moved already.
    again = case.tools().rotate(case.folder, **options)
    assert {file.path for file in again.failures} == set(map(str, paths)) and not again.counts[Outcome.ROTATED]


def test_with_several_tables_a_file_is_of_one_of_them(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory")
    case.write("own.parquet")
    case.write("other.parquet", tools=case.tools(column_keys={"kb": ["a", "nested"], "ka": ["b"]}))
    foreign = case.write("foreign.parquet", tools=case.tools(column_keys={"kb": ["a", "nested", "b"]}))
    table = {"footer_key": "kf", **case.settings}
    document = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": list(MASTER_KEYS)},
        "tables": {"t": table, "u": {**table, "column_keys": {"kb": ["a", "nested"], "ka": ["b"]}}},
    }
    report = Keytools(parse_configuration(document), kms=case.kms).rotate(case.folder, moves={"kf": "new"})
    assert report.counts == Counter({Outcome.ROTATED: 2, Outcome.FAILED: 1})
    assert [file.path for file in report.failures] == [str(foreign)]


def test_the_keys_of_footer_and_columns_are_those_of_one_table(tmp_path: Path) -> None:
    """What is put together of two tables is of neither, and nobody unwraps the footer's key of what is of none."""
    case = Case.make(tmp_path, "in_memory")
    of_other: dict[str, Any] = {"footer_key": "ka", "column_keys": {"kb": ["a", "nested"], "ka": ["b"]}}
    case.write("own.parquet")
    mixed = case.write("mixed.parquet", tools=case.tools(**{**of_other, "footer_key": "kf"}))
    document = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": list(MASTER_KEYS)},
        "tables": {"t": {"footer_key": "kf", **case.settings}, "u": {**case.settings, **of_other}},
    }
    tools = Keytools(parse_configuration(document), kms=case.kms)
    report = tools.rotate(case.folder, moves={"kf": "new"})
    assert report.counts == Counter({Outcome.ROTATED: 1, Outcome.FAILED: 1})
    assert [(file.path, file.error_class) for file in report.failures] == [(str(mixed), "TableMismatchError")]
    foreign = case.write("../foreign.parquet", tools=case.tools(footer_key="kb"))
    before = case.kms.call_counts
    assert tools.rotate(foreign, moves={"kf": "new"}).failures[0].error_class == "TableMismatchError"
    assert (case.kms.call_counts - before)["unwrap"] == 0


def test_a_new_version_opens_nothing_to_others_and_takes_every_file(tmp_path: Path) -> None:
    case = Case.make(tmp_path, "in_memory", aad_prefix="logs")
    case.write("own.parquet")
    case.write("other.parquet", tools=case.tools(aad_prefix="customers", footer_key="kb"))
    case.add_version()
    assert case.tools().rotate(case.folder).counts == Counter({Outcome.ROTATED: 2})
