"""What a caller asks a rotation for, and what is refused before any file is touched."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.config.settings import Configuration, ConfigurationWarning
from parquet_keytools.errors import ConfigurationError, MasterKeyDisabledError, NoParquetFilesError, OutputError
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.rotation import request as rotation_request
from parquet_keytools.rotation.batch import KmsInstance
from parquet_keytools.rotation.data_set_run import RunOptions
from parquet_keytools.rotation.journal import (
    FORMER_JOURNAL_NAME,
    JournalInUseError,
    JournalUnsafeError,
    kms_digest,
)
from parquet_keytools.rotation.report import KmsCalls, RotationReport
from parquet_keytools.rotation.request import RotationRequest, prefix_of, rotate_data_set, rotation_context
from parquet_keytools.rotation.rotation_plan import RotationContext, RotationPlan

NAMES = ("kf", "ka", "kb", "new")


class Kms(InMemoryKms):
    """A KMS that tells which master keys it was to trust, and may not list those that it has."""

    def __init__(self, *names: str, lists: bool = True) -> None:
        super().__init__(dict.fromkeys(names or NAMES))
        self.trusted: set[str] = set()
        self.lists = lists

    def trust_also(self, master_key_ids: Iterable[str]) -> None:
        self.trusted |= set(master_key_ids)

    def master_key_ids(self) -> frozenset[str] | None:
        return super().master_key_ids() if self.lists else None


def configured(tables: Iterable[str] = ("t",), instance_id: str = "one", **rotation: Any) -> Configuration:
    table = {"footer_key": "kf", "column_keys": {"ka": ["a"]}}
    kms = {"type": "in_memory", "keys": list(NAMES), "instance_id": instance_id}
    document: dict[str, Any] = {"version": 1, "kms": kms, "tables": dict.fromkeys(tables, table)}
    return parse_configuration({**document, "rotation": rotation})


def context_of(
    kms: Kms | None = None, configuration: Configuration | None = None, **asked: Any
) -> RotationContext:
    tools = Keytools(configuration or configured(), kms=kms or Kms())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigurationWarning)
        return rotation_context(tools._keys, RotationRequest(**asked))


@pytest.mark.parametrize("configured_so", [False, True])
@pytest.mark.parametrize("asked", [None, False, True])
def test_old_keys_are_kept_as_asked_or_else_as_configured(configured_so: bool, asked: bool | None) -> None:
    """Else who means to undo a rotation cannot."""
    configuration = configured(keep_old=configured_so)
    made = [context_of(None, configuration, keep_old=asked).keep_old for _ in range(2)]
    assert [bool(name) for name in made] == [configured_so if asked is None else asked] * 2
    assert made[0] is None or made[0] != made[1]


def test_all_that_is_asked_for_is_planned() -> None:
    context = context_of(only_master_keys=["ka"], older_than="1", new_keks=True, dry_run=True)
    assert context.plan == RotationPlan(only_master_keys=frozenset({"ka"}), older_than="1", new_keks=True)
    assert context.dry_run and context.rewrapper._new_keks and context.rewrapper._only_count
    context = context_of(moves={"ka": "new"})
    assert context.plan == RotationPlan(moves={"ka": "new"}) and context.instance is None
    assert not (context.dry_run or context.rewrapper._new_keks or context.rewrapper._only_count)


def test_the_journal_of_one_kms_is_not_that_of_another_one() -> None:
    own, other = configured(), configured(instance_id="two")
    within = context_of(None, own)
    to_other = context_of(None, own, new_kms=Kms(), new_configuration=other)
    assert within.kms_digest == kms_digest(own, own)
    assert to_other.kms_digest == kms_digest(own, other) != within.kms_digest


@pytest.mark.parametrize(("known", "instance"), [(True, KmsInstance("two", "DEFAULT")), (False, KmsInstance())])
def test_files_name_the_kms_that_they_are_moved_to(known: bool, instance: KmsInstance) -> None:
    new_configuration = configured(instance_id="two") if known else None
    context = context_of(new_kms=Kms(), new_configuration=new_configuration)
    assert context.instance == instance and context.plan.other_kms


def test_who_names_master_keys_trusts_them() -> None:
    """Each in its KMS, and no others."""
    kms, other = Kms(), Kms()
    context_of(kms, moves={"ka": "new"}, only_master_keys=["kb", "ka"])
    assert kms.trusted == {"ka", "kb", "new"}
    kms = Kms()
    context_of(kms, moves={"ka": "new"}, new_kms=other)
    assert kms.trusted == {"ka"} and other.trusted == {"new"}
    kms = Kms()
    context_of(kms)
    assert not kms.trusted


def test_names_of_one_master_key_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Mapping[str, str]] = []
    monkeypatch.setattr(rotation_request, "check_names", lambda plan, versions: seen.append(plan.moves))
    context_of(moves={"ka": "new"})
    assert seen == [{"ka": "new"}]


def test_moves_of_the_configuration_are_made_unless_others_are_asked_for() -> None:
    configuration = configured(moves={"ka": "new"})
    assert context_of(None, configuration).plan.moves == {"ka": "new"}
    assert context_of(None, configuration, moves={"kb": "new"}).plan.moves == {"kb": "new"}
    assert context_of(None, configuration, moves={}, new_kms=Kms()).plan.moves == {}


@pytest.mark.parametrize("given", ["new_kms", "both"])
def test_moves_of_the_configuration_are_within_one_kms(given: str) -> None:
    asked: dict[str, Any] = {"new_kms": Kms()}
    if given == "both":
        asked["new_configuration"] = configured(instance_id="two")
    with pytest.raises(ConfigurationError, match=r"rotation\.moves: moves are within one KMS"):
        context_of(None, configured(moves={"ka": "new"}), **asked)
    assert context_of(None, configured(), **asked).plan.other_kms


def test_moves_of_the_configuration_name_master_keys_of_the_kms() -> None:
    """Reported with their place, and before anything is trusted."""
    kms = Kms("kf", "kb", "new")
    with pytest.raises(ConfigurationError, match=r"rotation\.moves\.ka"):
        context_of(kms, configured((), moves={"ka": "new"}))
    assert not kms.trusted


@pytest.mark.parametrize("lists", [False, True])
def test_a_master_key_that_is_not_there_is_refused(lists: bool) -> None:
    """It would rotate nothing, and say so of no file."""
    for asked in ({"only_master_keys": ["kc"]}, {"moves": {"kc": "new"}}):
        with pytest.raises(ConfigurationError, match="kc"):
            context_of(Kms(lists=lists), **asked)
    context_of(Kms(lists=lists), only_master_keys=["ka"])


def test_a_mistyped_master_key_has_a_hint() -> None:
    for wrong, hint in (("neww", "'new'"), ("something else", "'ka', 'kb', 'kf', 'new'")):
        with pytest.raises(ConfigurationError, match="no master key") as caught:
            context_of(only_master_keys=[wrong])
        assert hint in caught.value.hint and ("Known" in caught.value.hint) is (wrong != "neww")


def test_nothing_is_moved_to_a_master_key_that_cannot_be_used() -> None:
    kms, other = Kms(), Kms()
    other.disable("new")
    with pytest.raises(MasterKeyDisabledError) as caught:
        context_of(kms, moves={"ka": "new"}, new_kms=other)
    assert (caught.value.master_key_id, caught.value.backend) == ("new", other.backend)
    assert context_of(kms, moves={"ka": "new"})


def test_two_names_of_one_move_are_refused() -> None:
    document = {"version": 1, "kms": {"type": "in_memory", "keys": list(NAMES)}, "master_keys": {"pii": "ka"}}
    with pytest.raises(ConfigurationError, match="mean the same one"):
        context_of(None, parse_configuration(document), moves={"pii": "new", "ka": "new"})


def test_readers_are_warned_of_within_one_kms_alone() -> None:
    """In another one its own configuration is theirs."""
    keys = Keytools(configured(["t", "u"]), kms=Kms())._keys
    with pytest.warns(ConfigurationWarning) as caught:
        rotation_context(keys, RotationRequest(moves={"ka": "new"}))
    assert [str(one.message).split("'")[1] for one in caught] == ["t", "u"]
    with pytest.warns(ConfigurationWarning) as caught:
        rotation_context(keys, RotationRequest(moves={"ka": "new"}, table_name="u"))
    assert [str(one.message).split("'")[1] for one in caught] == ["u"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rotation_context(keys, RotationRequest(moves={"ka": "new"}, new_kms=Kms()))


def test_a_warning_is_shown_at_the_line_of_the_caller(tmp_path: Path) -> None:
    tools = Keytools(configured(), kms=Kms())
    with pytest.warns(ConfigurationWarning) as caught, pytest.raises(NoParquetFilesError):
        tools.rotate(tmp_path, moves={"ka": "new"})
    assert caught[0].filename == __file__


OPENS, STAYS = RotationPlan(moves={"ka": "new"}), RotationPlan()


@pytest.mark.parametrize(
    ("tables", "table", "plan", "stored", "given", "is_asked"),
    [
        (1, None, OPENS, b"p", None, True),
        (2, "t", OPENS, b"p", None, True),
        (2, None, OPENS, b"p", None, False),
        (1, None, STAYS, b"p", None, False),
        (1, None, None, b"p", None, False),
        (1, "t", STAYS, b"p", "given", True),
        (2, None, STAYS, None, None, True),
    ],
)
def test_a_stored_prefix_is_believed_where_nobody_else_comes_to_read(
    tables: int, table: str | None, plan: Any, stored: bytes | None, given: str | None, is_asked: bool
) -> None:
    """A file that was copied from another table would become readable to those of this one."""
    asked: list[Any] = []

    def expected(*of: Any) -> bytes:
        asked.append(of)
        return b"expected"

    keys: Any = SimpleNamespace(configuration=configured("tu"[:tables]), expected_aad_prefix=expected)
    location: Any = object()
    found = prefix_of(keys, table, given, plan)(location, stored)
    assert (found == b"expected") is is_asked
    assert asked == ([(location, table, given, stored)] if is_asked else [])


# --- journals ---


class Run:
    """The run of a rotation without files, with what takes the place of its journal."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, *, is_file: bool = False) -> None:
        self.place: Any = SimpleNamespace(is_local=True, path=str(folder), only=())
        self.asked: list[Any] = []
        self.used: list[Any] = []
        self.error: Exception | None = None
        self.versions: dict[str, str | None] = {}
        self.forgotten = 0
        monkeypatch.setattr(rotation_request, "file_or_folder", lambda _: SimpleNamespace(is_file=is_file))
        self.is_inside = False
        self.refused: list[Any] = []
        monkeypatch.setattr(rotation_request, "is_inside", lambda *_: self.is_inside)
        monkeypatch.setattr(rotation_request, "refuse_inside", lambda *of: self.refused.append(of))
        monkeypatch.setattr(rotation_request, "Journal", self.journal)
        monkeypatch.setattr(rotation_request, "change_data_set", lambda *of: self.used.append(of[-1]))

    def journal(self, file: Path | None, parameters: Mapping[str, Any]) -> Any:
        self.asked.append((file, parameters))
        if self.error is not None:
            raise self.error
        return self

    def forget_made(self) -> None:
        self.forgotten += 1

    def start(self, journal: Path | None = None, **asked: Any) -> RotationReport:
        return rotate_data_set(self.place, context_of(**asked), RunOptions(journal))


@pytest.mark.parametrize(
    ("is_file", "named", "dry_run", "used"),
    [
        (False, False, False, True),
        (False, True, False, True),
        (True, True, False, True),
        (True, False, False, False),
        (False, True, True, False),
        (False, False, True, False),
    ],
)
def test_a_folder_has_a_journal_and_a_file_if_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_file: bool, named: bool, dry_run: bool, used: bool
) -> None:
    run = Run(monkeypatch, tmp_path, is_file=is_file)
    file = tmp_path / "journal" if named else None
    report = run.start(file, dry_run=dry_run)
    assert run.used == [run if used else None] and [of[0] for of in run.asked] == [file] * used
    assert report.dry_run is dry_run and report.expected_kms_calls == KmsCalls()


class Part(SimpleNamespace):
    def __str__(self) -> str:
        return str(self.path)


def test_a_journal_is_of_one_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that another one has finished are not finished for this one."""
    run = Run(monkeypatch, tmp_path)
    others: list[dict[str, Any]] = [{}, {"keep_old": True}, {"moves": {"ka": "new"}}, {"new_kms": Kms()}]
    for asked in (*others, {"new_keks": True}, {"new_kms": Kms(), "new_configuration": configured((), "two")}):
        run.start(**asked)
    whole = str(run.place)
    for only in (("a", "b"), ("a",)):
        run.place = Part(is_local=True, path=whole, only=only)
        run.start()
    made = [parameters for _, parameters in run.asked]
    assert all(one != other for at, one in enumerate(made) for other in made[:at])
    run.start()
    assert run.asked[-1][1] == made[-1]


def test_no_journal_lies_in_the_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may write there could say that files are finished."""
    run = Run(monkeypatch, tmp_path)
    run.is_inside = True
    assert "lies in the data set itself" in run.start().no_journal
    assert not run.asked and not run.refused and run.used == [None]
    file = tmp_path / "journal"
    assert not run.start(file).no_journal
    assert run.refused == [(file, run.place)] and run.used == [None, run]


def test_a_dry_run_alone_foresees_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, tmp_path)
    for dry_run in (False, True):
        report = run.start(moves={"ka": "new"}, dry_run=dry_run)
        assert report.kms_calls == KmsCalls(describe=1)
        assert report.expected_kms_calls == KmsCalls(describe=int(dry_run))


@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize("is_file", [False, True])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_journal_in_the_folder_is_not_read_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_local: bool, is_file: bool, is_there: bool
) -> None:
    if is_there:
        (tmp_path / FORMER_JOURNAL_NAME).touch()
    run = Run(monkeypatch, tmp_path, is_file=is_file)
    run.place.is_local = is_local
    told = str(tmp_path / FORMER_JOURNAL_NAME) if is_there and is_local and not is_file else None
    assert run.start().ignored_journal == told


def test_without_a_journal_a_rotation_goes_on_unless_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(monkeypatch, tmp_path)
    run.error = OutputError("no room")
    assert "no room" in (run.start().no_journal or "")
    with pytest.raises(OutputError, match="no room"):
        run.start(tmp_path / "journal")
    run.error = JournalInUseError("in use")
    for file in (None, tmp_path / "journal"):
        report = run.start(file)
        assert report.journal_in_use and not report.no_journal
    assert run.used == [None] * 3
    run.error = JournalUnsafeError("of others")
    for file in (None, tmp_path / "journal"):
        with pytest.raises(JournalUnsafeError):
            run.start(file)
    assert run.used == [None] * 3


@pytest.mark.parametrize(
    ("versions", "forgotten"),
    [
        ({}, 0),
        ({"ka": "1"}, 0),
        ({"ka": None}, 0),
        ({"ka": "0"}, 1),
        ({"ka": "0", "kb": "0"}, 1),
        ({"kc": "1"}, 0),
    ],
)
def test_what_was_made_under_a_former_version_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versions: dict[str, str | None], forgotten: int
) -> None:
    """Else the rotation would end with keys under a version that is to be disabled."""
    run = Run(monkeypatch, tmp_path)
    run.versions = versions
    context = context_of()
    current = {"ka": "1", "kb": "1"}.get
    context.versions.current = lambda key, *, new=False: current(key) if new else None  # type: ignore[method-assign]
    rotate_data_set(run.place, context, RunOptions(None))
    assert run.forgotten == forgotten and run.used == [run]
