"""The inventory of keys, compared with what fails when a key is disabled: each file, each column."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from openbao import OpenBao
from rotation_case import TABLE, Case, materials
from soak import SOAK

from parquet_keytools import Keytools
from parquet_keytools.errors import KeytoolsError
from parquet_keytools.kms.vault import VaultKms, VaultSettings
from parquet_keytools.rotation.report import Outcome

KINDS: dict[str, dict[str, Any]] = {
    "internal": {"key_material": "internal"},
    "external": {"key_material": "external"},
    "plaintext_footer": {"key_material": "internal", "plaintext_footer": True},
    "single": {"double_wrapping": False},
    "footer_key": {"column_keys": {"ka": ["a"]}, "unlisted_columns": "footer_key"},
}

STATES = ("old", "new", "mixed")

Loss = set[tuple[str, str]]
"""Pairs of file name and column."""


class Operator(Protocol):
    """Manages the master keys of a KMS."""

    case: Case

    def add_version(self) -> None: ...

    def disabled(self, master_key: str, version: str | None) -> contextlib.AbstractContextManager[None]:
        """Disable a version, or all of them, for unwrapping."""
        ...


class KeystoreOperator:
    def __init__(self, case: Case) -> None:
        self.case = case

    def add_version(self) -> None:
        self.case.add_version("kf", "ka", "kb")

    @contextlib.contextmanager
    def disabled(self, master_key: str, version: str | None) -> Iterator[None]:
        keystore = self.case.keystore
        assert keystore is not None
        number = None if version is None else int(version)
        keystore.set_enabled(master_key, False, number)
        yield
        keystore.set_enabled(master_key, True, number)


class VaultOperator:
    """Disables versions by the minimum version that decrypts."""

    def __init__(self, case: Case, server: OpenBao) -> None:
        self.case = case
        self._server = server

    def add_version(self) -> None:
        for name in ("kf", "ka", "kb"):
            self._server.rotate_key(name)

    @contextlib.contextmanager
    def disabled(self, master_key: str, version: str | None) -> Iterator[None]:
        if version is None:
            self._server.disable_key(master_key)
            yield
            self._server.ask("POST", f"transit/keys/{master_key}/soft-delete-restore")
        else:
            self._server.configure_key(master_key, min_decryption_version=int(version) + 1)
            yield
            self._server.configure_key(master_key, min_decryption_version=1)


@pytest.fixture(params=["keystore", "vault"])
def operator(request: pytest.FixtureRequest, tmp_path: Path) -> Operator:
    if request.param == "keystore":
        return KeystoreOperator(Case.make(tmp_path, "keystore", ("kf", "ka", "kb")))
    server: OpenBao = request.getfixturevalue("openbao")
    for name in ("kf", "ka", "kb"):
        if server.has_key(name):
            server.configure_key(name, deletion_allowed=True)
            server.ask("DELETE", f"transit/keys/{name}")
        server.create_key(name)
    kms = VaultKms.from_settings(
        VaultSettings.model_validate({"url": server.url, "token": server.root_token}), tmp_path
    )
    folder = tmp_path / "data"
    folder.mkdir()
    return VaultOperator(Case(folder, kms, None), server)


def write_all(operator: Operator) -> None:
    """Write files of all kinds, with keys of two versions, separate and mixed."""
    case = operator.case
    # A server takes most of the time: there, except in a soak, each kind is in one state only.
    all_of_them = SOAK or case.keystore is not None
    for kind, state in itertools.product(KINDS, STATES) if all_of_them else zip(KINDS, itertools.cycle(STATES)):
        case.write(f"{kind}-{state}.parquet", tools=case.tools(**KINDS[kind]))
    operator.add_version()
    for path in sorted(case.folder.glob("*.parquet")):
        if "-old" not in path.name:
            only = ["ka"] if "-mixed" in path.name else None
            (file,) = case.tools().rotate(path, only_master_keys=only).files
            assert file.outcome is Outcome.ROTATED, file


def predicted(case: Case, master_key: str, version: str | None) -> Loss:
    """Return what cannot be read without a key, according to the inventory."""
    lost: Loss = set()
    files = set()
    for file in case.tools().files_using(master_key, case.folder, version=version):
        name = Path(file.path).name
        assert file.unknown is None and file.depends_on(master_key, version)
        files.add(name)
        for use in file.uses:
            if use.master_key_id != master_key or version not in (None, use.version):
                continue
            # Without its footer, nothing in a file can be read.
            columns = TABLE.column_names if use.column is None else [use.column.split(".")[0]]
            lost |= {(name, column) for column in columns}
    assert files == {name for name, _ in lost}
    return lost


def happened(case: Case) -> Loss:
    """Return what cannot be read now."""
    lost: Loss = set()
    # With empty caches.
    tools_of = {kind: case.tools(**settings) for kind, settings in KINDS.items()}
    for path in sorted(case.folder.glob("*.parquet")):
        # With the settings of the file's table.
        tools = tools_of[path.stem.rpartition("-")[0]]

        def reads(columns: list[str], path: Path = path, tools: Keytools = tools) -> bool:
            try:
                assert tools.read_table(path, columns=columns).equals(TABLE.select(columns))
            except KeytoolsError:
                return False
            return True

        if not reads(TABLE.column_names):
            lost |= {(path.name, column) for column in TABLE.column_names if not reads([column])}
    return lost


def test_the_inventory_says_what_happens(operator: Operator) -> None:
    write_all(operator)
    case = operator.case
    sizes = {}
    for master_key in ("kf", "ka", "kb"):
        # OpenBao cannot disable only the newer of two versions.
        for version in ("1", None):
            expected = predicted(case, master_key, version)
            with operator.disabled(master_key, version):
                assert happened(case) == expected, (master_key, version)
            sizes[master_key, version] = len(expected)
    number_of_files = len(list(case.folder.glob("*.parquet")))
    print(f"\n{number_of_files} files, {TABLE.num_columns} columns; lost with each key: {sizes}")
    assert all(0 < number < number_of_files * TABLE.num_columns for key, number in sizes.items() if key[0] != "kf")
    assert happened(case) == set()


def test_nothing_uses_the_old_versions_after_a_rotation(operator: Operator) -> None:
    write_all(operator)
    case = operator.case
    assert case.tools().rotate(case.folder).succeeded
    with contextlib.ExitStack() as disabled:
        for master_key in ("kf", "ka", "kb"):
            assert list(case.tools().files_using(master_key, case.folder, version="1")) == []
            disabled.enter_context(operator.disabled(master_key, "1"))
        assert happened(case) == set()


@pytest.mark.parametrize("key_material", ["internal", "external"])
def test_twice_within_an_hour(operator: Operator, key_material: str) -> None:
    """pyarrow's own rotation makes no KMS call the second time. The versions show that ours does."""
    case = operator.case
    path = case.write(tools=case.tools(key_material=key_material))
    # One for all: its caches must not make a difference.
    tools = case.tools()
    seen = []
    for _ in range(3):
        wrapped = [(m.kms_wrapped_key, m.master_key_id) for m in materials(case.tools(), path)]
        seen.append({case.kms.wrapped_key_version(*key) for key in wrapped})
        operator.add_version()
        assert tools.rotate(path).files[0].outcome is Outcome.ROTATED
    assert seen == [{"1"}, {"2"}, {"3"}]
    assert tools.rotate(path).files[0].outcome is Outcome.ALREADY_CURRENT
