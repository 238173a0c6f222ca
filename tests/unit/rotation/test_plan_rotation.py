"""The arguments of a rotation, and what is refused before any file is touched."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from key_services import key_service

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.config.settings import Configuration, ConfigurationWarning
from parquet_keytools.errors import ConfigurationError, NoParquetFilesError
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.rotation.report import KmsCalls
from parquet_keytools.rotation.rotate import RotationPlan, plan_rotation, prefix_of

NAMES = ("kf", "ka", "kb", "new")


class Kms(InMemoryKms):
    """A KMS that records which master keys it was to trust."""

    def __init__(self, *names: str) -> None:
        super().__init__(dict.fromkeys(names or NAMES))
        self.trusted: set[str] = set()

    def trust_also(self, master_key_ids: Iterable[str]) -> None:
        self.trusted |= set(master_key_ids)


def configured(tables: Iterable[str] = ("t",), **rotation: Any) -> Configuration:
    table = {"footer_key": "kf", "column_keys": {"ka": ["a"]}, "unlisted_columns": "plaintext"}
    kms = {"type": "in_memory", "keys": list(NAMES)}
    document: dict[str, Any] = {"version": 1, "kms": kms, "tables": dict.fromkeys(tables, table)}
    return parse_configuration({**document, "rotation": rotation})


def plan_of(kms: Kms | None = None, configuration: Configuration | None = None, **asked: Any) -> RotationPlan:
    tools = Keytools(configuration or configured(), kms=kms or Kms())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigurationWarning)
        return plan_rotation(key_service(tools), **asked)


def test_who_names_master_keys_trusts_them() -> None:
    """And no others."""
    kms = Kms()
    plan_of(kms, moves={"ka": "new"}, only_master_keys=["kb", "ka"])
    assert kms.trusted == {"ka", "kb", "new"}
    kms = Kms()
    plan_of(kms)
    assert not kms.trusted


def test_moves_of_the_configuration_are_made_unless_others_are_asked_for() -> None:
    configuration = configured(moves={"ka": "new"})
    assert plan_of(None, configuration).moves == {"ka": "new"}
    assert plan_of(None, configuration, moves={"kb": "new"}).moves == {"kb": "new"}
    assert plan_of(None, configuration, moves={}).moves == {}


def test_moves_of_the_configuration_name_master_keys_of_the_kms() -> None:
    """Reported with their place, and before any key is trusted."""
    kms = Kms("kf", "kb", "new")
    with pytest.raises(ConfigurationError, match=r"rotation\.moves\.ka"):
        plan_of(kms, configured((), moves={"ka": "new"}))
    assert not kms.trusted


def test_a_mistyped_master_key_has_a_hint() -> None:
    for wrong, hint in (("neww", "'new'"), ("something else", "'ka', 'kb', 'kf', 'new'")):
        with pytest.raises(ConfigurationError, match="no master key") as caught:
            plan_of(only_master_keys=[wrong])
        assert hint in caught.value.hint and ("Known" in caught.value.hint) is (wrong != "neww")


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
    """A file copied from another table would become readable to this table's readers."""
    asked: list[Any] = []

    def expected(*of: Any) -> bytes:
        asked.append(of)
        return b"expected"

    keys: Any = SimpleNamespace(configuration=configured("tu"[:tables]), expected_aad_prefix=expected)
    location: Any = object()
    opens = plan is not None and bool(plan.moves)
    found = prefix_of(keys, table, given, opens_to_others=opens)(location, stored)
    assert (found == b"expected") is is_asked
    assert asked == ([(location, table, given, stored)] if is_asked else [])


@pytest.mark.parametrize("dry_run", [False, True])
def test_the_master_key_to_move_to_is_described_once(tmp_path: Path, dry_run: bool) -> None:
    """Looking up the target master key changes nothing."""
    (tmp_path / "x.parquet").touch()
    tools = Keytools(configured(), kms=Kms())
    with pytest.warns(ConfigurationWarning):
        report = tools.rotate(tmp_path, moves={"ka": "new"}, dry_run=dry_run)
    assert report.dry_run is dry_run and report.kms_calls == KmsCalls(describe=1)
    assert report.expected_kms_calls == KmsCalls(describe=int(dry_run))
