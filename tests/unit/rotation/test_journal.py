"""The journal of a rotation: what it says after a run was cut off, and when its bytes are on the disk.

Journals that somebody else wrote, or may write, are in `tests/tamper/test_hostile_rotation.py`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path
from typing import Any

import pytest

from parquet_keytools import parse_configuration
from parquet_keytools.errors import ConfigurationError, OutputError, StorageFailedError
from parquet_keytools.rotation import journal as journals
from parquet_keytools.rotation.journal import (
    KEPT_SECONDS,
    Journal,
    JournalInUseError,
    JournalUnsafeError,
    is_inside,
    journal_folder,
    kms_digest,
    refuse_inside,
)
from parquet_keytools.rotation.rewrapper import WrappedKey
from parquet_keytools.storage.locations import FileLocation

PARAMETERS: dict[str, Any] = {"folder": "/data", "moves": {"a": "b"}, "new_keks": False}
KEYS = [WrappedKey("kf", f"wrapped {number}") for number in range(20)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This user's state, which a test has for itself."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def cut_off(path: Path | None, keys: list[WrappedKey | bytes] | list[WrappedKey]) -> Path:
    """Write the journal of a run that made some keys, and did not come to its end."""
    journal = Journal(path, PARAMETERS)
    journal.add_made(keys)
    journal.close(remove=False)
    return journal.path


# --- what was made ---


def test_the_next_run_knows_what_was_made(path: Path) -> None:
    cut_off(path, [*KEYS[:15], b"a fresh KEK"])
    journal = Journal(path, PARAMETERS)
    assert [journal.was_made(key) for key in KEYS] == [True] * 15 + [False] * 5
    assert journal.was_made(b"a fresh KEK") and not journal.was_made(b"another one")
    # The same text under another master key is another wrapped key.
    assert not journal.was_made(WrappedKey("kc", KEYS[0].wrapped_key))
    journal.close(remove=True)
    assert not path.exists()


def test_a_run_does_not_skip_what_it_made_itself(path: Path) -> None:
    """`was_made` is about earlier runs: their files may be finished, or not."""
    journal = Journal(path, PARAMETERS)
    journal.add_made(KEYS)
    assert not any(map(journal.was_made, KEYS))
    journal.close(remove=False)


def test_a_key_is_written_once(path: Path) -> None:
    cut_off(path, [KEYS[0], KEYS[0]])
    journal = Journal(path, PARAMETERS)
    journal.add_made([KEYS[1]])
    length = path.stat().st_size
    journal.add_made([KEYS[1]])
    journal.add_made([])
    assert path.stat().st_size == length
    journal.close(remove=False)


def test_nothing_is_written_after_the_end(path: Path, tmp_path: Path) -> None:
    """A worker process may say what it made when Ctrl-C has ended the run: another file has the number by then."""
    journal = Journal(path, PARAMETERS)
    number = journal._file_descriptor
    journal.close(remove=False)
    length = path.stat().st_size
    with (tmp_path / "another.parquet").open("wb") as another:
        assert another.fileno() == number
        with pytest.raises(StorageFailedError):
            journal.add_made(KEYS)
    assert (tmp_path / "another.parquet").stat().st_size == 0 and path.stat().st_size == length


def test_lines_follow_a_torn_one(path: Path) -> None:
    cut_off(path, KEYS[:2])
    path.write_bytes(path.read_bytes()[:-5])
    cut_off(path, KEYS[2:3])
    journal = Journal(path, PARAMETERS)
    assert [journal.was_made(key) for key in KEYS[:4]] == [True, False, True, False]
    journal.close(remove=False)


def test_what_was_made_of_older_versions_is_forgotten(path: Path) -> None:
    journal = Journal(path, PARAMETERS)
    journal.add_version("kf", "1")
    journal.add_made(KEYS[:1])
    journal.close(remove=False)
    journal = Journal(path, PARAMETERS)
    assert journal.was_made(KEYS[0]) and journal.versions == {"kf": "1"}
    journal.forget_made()
    assert not journal.was_made(KEYS[0]) and journal.versions == {}
    journal.add_version("kf", "2")
    journal.add_made(KEYS[1:2])
    journal.close(remove=False)
    journal = Journal(path, PARAMETERS)
    assert [journal.was_made(key) for key in KEYS[:2]] == [False, True]
    assert journal.versions == {"kf": "2"}
    journal.close(remove=False)


def test_versions_are_forgotten_for_the_next_run_too(path: Path) -> None:
    journal = Journal(path, PARAMETERS)
    journal.add_version("kf", "1")
    journal.forget_made()
    journal.close(remove=False)
    journal = Journal(path, PARAMETERS)
    assert journal.versions == {}
    journal.close(remove=False)


def test_the_first_version_of_a_run_stays(path: Path) -> None:
    """It is that of the first keys: a version that came later would skip keys under the older one."""
    journal = Journal(path, PARAMETERS)
    journal.add_version("kf", "1")
    journal.add_version("kf", "2")
    journal.add_version("hidden", None)
    journal.versions.clear()
    assert journal.versions == {"kf": "1", "hidden": None}
    journal.close(remove=False)
    journal = Journal(path, PARAMETERS)
    assert journal.versions == {"kf": "1", "hidden": None}
    journal.close(remove=False)


@pytest.mark.parametrize(
    "line", [b"[]", b'{"made":"00"}', b'{"made":"zz"}', b'{"made":7}', b"{}", b'{"master_key":"kf"}', b"\xff"]
)
def test_a_line_that_is_none_of_a_journal(path: Path, line: bytes) -> None:
    cut_off(path, KEYS[:1])
    content = path.read_bytes() + line + b"\n"
    path.write_bytes(content)
    with pytest.raises(OutputError, match=r"journal\.jsonl, line 3: this is not a line of a rotation journal"):
        Journal(path, PARAMETERS)
    assert path.read_bytes() == content
    # What could not be read is not kept open, nor locked.
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


# --- on the disk ---


class Syncs:
    """Counts fsync, and turns the clock of the journal."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.seconds = 100.0
        monkeypatch.setattr(journals.os, "fsync", self._fsync)
        monkeypatch.setattr(journals.time, "monotonic", lambda: self.seconds)

    def _fsync(self, file_descriptor: int) -> None:
        self.count += 1


def test_keys_are_on_the_disk_after_two_seconds_and_at_the_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs = Syncs(monkeypatch)
    journal = Journal(path, PARAMETERS)
    assert syncs.count == 1
    for seconds, count in ((0.0, 1), (2.0, 1), (2.1, 2), (4.0, 2), (4.2, 3)):
        syncs.seconds = 100.0 + seconds
        journal.add_made([f"at {seconds}".encode()])
        assert syncs.count == count
    journal.close(remove=False)
    assert syncs.count == 4


def test_a_disk_that_is_full_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(path, PARAMETERS)

    def full(file_descriptor: int, *rest: object) -> int:
        raise OSError(errno.ENOSPC, "no space")

    for name, act in (("write", lambda: journal.add_made(KEYS)), ("fsync", journal.sync)):
        with monkeypatch.context() as patch:
            patch.setattr(journals.os, name, full)
            with pytest.raises(
                StorageFailedError, match=r"journal\.jsonl cannot be written: no space left"
            ) as caught:
                act()
        assert caught.value.error_number == errno.ENOSPC
    journal.close(remove=True)


# --- where it is ---


def test_runs_with_other_parameters_have_journals_of_their_own(state: Path) -> None:
    first = Journal(None, PARAMETERS)
    assert first.path.parent == journal_folder() == state / "parquet-keytools" / "journals"
    for made in (first.path.parent, first.path.parent.parent):
        assert made.stat().st_mode & 0o777 == 0o700
    assert first.path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(JournalInUseError):
        Journal(None, dict(PARAMETERS))
    second = Journal(None, PARAMETERS | {"new_keks": True})
    assert second.path != first.path
    for journal in (first, second):
        journal.close(remove=True)
    assert list(journal_folder().iterdir()) == []


@pytest.mark.parametrize("is_given", [False, True])
def test_journals_that_no_run_goes_on_with_are_removed(state: Path, path: Path, is_given: bool) -> None:
    kept = {}
    for name, age in (("young", KEPT_SECONDS - 60), ("old", KEPT_SECONDS + 60), ("used", KEPT_SECONDS + 60)):
        journal = Journal(None, PARAMETERS | {"name": name})
        os.utime(journal.path, (time.time() - age,) * 2)
        kept[name] = journal
    for name in ("young", "old"):
        os.close(kept[name]._file_descriptor)
    Journal(path if is_given else None, PARAMETERS).close(remove=True)
    assert kept["young"].path.exists() and kept["used"].path.exists()
    assert kept["old"].path.exists() == is_given
    os.close(kept["used"]._file_descriptor)


def test_files_beside_a_journal_that_was_named_are_left_alone(path: Path) -> None:
    old = path.with_name("old.jsonl")
    old.touch()
    os.utime(old, (0, 0))
    Journal(path, PARAMETERS).close(remove=True)
    assert old.exists() and not path.exists()


def test_what_is_in_the_way_is_said(tmp_path: Path, path: Path, state: Path) -> None:
    state.touch()
    with pytest.raises(OutputError, match=r"the folder of journals .* cannot be made: file exists") as caught:
        Journal(None, PARAMETERS)
    assert "--journal" in caught.value.hint
    with pytest.raises(OutputError, match="cannot be written: No such file or directory"):
        Journal(tmp_path / "none" / "journal", PARAMETERS)
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(JournalUnsafeError, match=r"journal\.jsonl is a link"):
        Journal(path, PARAMETERS)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("others", ["file", "folder", "link"])
def test_what_others_may_write_is_refused(path: Path, state: Path, others: str) -> None:
    """Whoever can write a journal can have keys skipped."""
    if others == "file":
        cut_off(path, KEYS).chmod(0o620)
    elif others == "folder":
        (state / "parquet-keytools").mkdir(parents=True)
        (state / "parquet-keytools").chmod(0o770)
    else:
        (state / "real").mkdir(parents=True)
        (state / "parquet-keytools").symlink_to(state / "real")
    with pytest.raises(JournalUnsafeError, match="only this user may write to"):
        Journal(path if others == "file" else None, PARAMETERS)
    with pytest.raises(ConfigurationError, match="would lie in the data set"):
        refuse_inside(path, FileLocation.resolve(path.parent))
    refuse_inside(path, FileLocation.resolve(state if state.exists() else "/usr"))


def test_a_journal_that_was_replaced_is_not_removed(path: Path) -> None:
    journal = Journal(path, PARAMETERS)
    path.unlink()
    path.write_text("of somebody else")
    journal.close(remove=True)
    assert path.read_text() == "of somebody else"


def test_a_state_folder_that_is_no_absolute_path_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert journal_folder() == Path("/home/somebody/.local/state/parquet-keytools/journals")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert journal_folder() == Path("/home/somebody/.local/state/parquet-keytools/journals")


def test_a_user_without_a_home_has_no_folder_of_journals(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)
    with pytest.raises(OutputError, match=r"no home folder, where journals are kept\. .*--journal"):
        journal_folder()


def test_a_new_user_has_no_state_folder_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "deep" / "down"))
    Journal(None, PARAMETERS).close(remove=True)
    assert (tmp_path / "deep" / "down" / "parquet-keytools" / "journals").is_dir()


def test_a_journal_that_is_removed_while_it_is_opened(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that had it came to its end: what was opened has no name any more, and nobody would find it."""
    removed = []

    def lock(file_descriptor: int, operation: int) -> None:
        if not removed:
            path.unlink()
            removed.append(path)

    monkeypatch.setattr(fcntl, "flock", lock)
    journal = Journal(path, PARAMETERS)
    assert removed and path.exists()
    journal.close(remove=True)
    assert not path.exists()


def lowest_free_descriptor() -> int:
    descriptor = os.dup(0)
    os.close(descriptor)
    return descriptor


def test_a_refused_journal_is_not_kept_open(path: Path) -> None:
    journal = Journal(path, PARAMETERS)
    others = path.with_name("others")
    others.touch(0o622)
    others.chmod(0o622)
    before = lowest_free_descriptor()
    for _ in range(3):
        with pytest.raises(JournalInUseError, match=r"another run writes the journal .*journal\.jsonl now"):
            Journal(path, PARAMETERS)
        with pytest.raises(JournalUnsafeError, match=r"the journal .*others is not a regular file"):
            Journal(others, PARAMETERS)
    assert lowest_free_descriptor() == before
    journal.close(remove=True)


def test_inside_is_by_where_links_lead(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder / "deep")
    (tmp_path / "file.parquet").touch()
    data_set = FileLocation.resolve(folder)
    for inside in (folder / "j", folder / "deep" / "j", tmp_path / "link" / "j", folder):
        assert is_inside(inside, data_set)
    for outside in (tmp_path / "j", tmp_path / "data-j"):
        assert not is_inside(outside, data_set)
    assert not is_inside(tmp_path / "file.parquet" / "j", FileLocation.resolve(tmp_path / "file.parquet"))


# --- of which KMS ---


def configuration(folder: Path, **settings: object) -> Any:
    document = {"version": 1, "kms": {"type": "vault", "url": "https://one", "token": "t", **settings}}
    document["tables"] = {"t": {"footer_key": "kf", "unlisted_columns": "footer_key"}}
    return parse_configuration(document, file=folder / "c.yaml")


def test_each_kms_has_a_digest_of_its_own(tmp_path: Path) -> None:
    """What a run moved to one KMS is not finished for a run that moves to another one."""
    one, other = configuration(tmp_path), configuration(tmp_path, url="https://two")
    moved = configuration(tmp_path / "elsewhere")
    digests = [
        kms_digest(one),
        kms_digest(other),
        kms_digest(moved),
        kms_digest(one, other),
        kms_digest(other, one),
    ]
    assert len(set(digests)) == 5
    assert kms_digest(one, None) == kms_digest(one) == kms_digest(configuration(tmp_path))
    assert all(len(bytes.fromhex(digest)) == 16 for digest in digests)


def test_a_secret_that_differs_from_run_to_run_does_not_count(tmp_path: Path) -> None:
    assert kms_digest(configuration(tmp_path)) == kms_digest(configuration(tmp_path, token="another"))


def test_a_folder_whose_name_is_no_unicode_has_a_digest(tmp_path: Path) -> None:
    assert kms_digest(configuration(tmp_path / "\udcff")) != kms_digest(configuration(tmp_path))
