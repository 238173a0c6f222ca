"""Deletes the master keys of a value: plan, deletion, proof and certificate (`docs/erase.md`).

Authentic footers name the keys, so the plan needs none of them, and is the same after the deletion. After an
interruption, repeat the run: the KMS shows what is done.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from parquet_keytools import audit
from parquet_keytools.config.key_policy import configured_master_key_ids, keys_of_value, resolve_columns
from parquet_keytools.config.settings import alike, is_value, placeholders, value_in, values_in_folders
from parquet_keytools.errors import (
    ConfigurationError,
    ErasureRefusedError,
    KmsError,
    KmsResponseInvalidError,
    KmsUnavailableError,
    MasterKeyDisabledError,
    MasterKeyNotFoundError,
)
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.kms.client import CallerIdentity, KeyDeletion, KmsClient, UnwrapRequest
from parquet_keytools.kms.registry import make_client
from parquet_keytools.rotation.file_keys import SameMasterKey, same_master_key
from parquet_keytools.rotation.inventory import FileKeyUses, Inventory, UsedKey
from parquet_keytools.rotation.rotate import prefix_of
from parquet_keytools.runtime.presentation import escaped_path, printable
from parquet_keytools.storage.locations import FileLocation

GONE = (MasterKeyNotFoundError, MasterKeyDisabledError)
"""The errors of a KMS that lacks the master key, has disabled it, or has scheduled its deletion."""

FOOTER = "(footer)"
HIDDEN = "(a column whose name is hidden)"


@dataclass(frozen=True)
class ErasedKey:
    """A master key of the value; `template` is its name in the configuration, with the placeholder."""

    template: str
    master_key_id: str
    deletion: KeyDeletion

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON document."""
        found = asdict(self.deletion)
        at = self.deletion.deletes_at
        found["deletes_at"] = None if at is None else at.isoformat(timespec="seconds")
        return {"template": self.template, "master_key_id": self.master_key_id, **found}


@dataclass(frozen=True)
class ErasedColumn:
    """A column, or `(footer)`, under a master key of the value, whose version may be unknown."""

    column: str
    master_key_id: str
    key_version: str | None


@dataclass(frozen=True)
class ErasedFile:
    """A file with columns under a master key of the value.

    Attributes:
        path: The file.
        version_id: Identifier of an older version in a versioned bucket; None for the file as it is now.
        size_bytes: Its length.
        footer_sha256: SHA-256, in hexadecimal, of the bytes from the footer's start to the end of the file.
        footer_authenticated: Whether the footer was authenticated: not if it is under a key that is gone.
        columns: What is under these master keys.
    """

    path: str
    version_id: str | None
    size_bytes: int
    footer_sha256: str
    footer_authenticated: bool
    columns: tuple[ErasedColumn, ...]


@dataclass(frozen=True)
class Note:
    """Something that forbids the deletion, or that the deletion does not reach; examples are files or columns."""

    text: str
    examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What the deletion of the master keys of a value of a placeholder, such as `tenant`, erases.

    Attributes:
        paths: What was examined.
        files: The files with columns under the master keys.
        problems: What forbids the deletion: it would lose other data, or leave data of the value readable.
        wrapped_keys: The distinct wrapped keys of these columns.
    """

    table: str
    placeholder: str
    value: str
    paths: tuple[str, ...]
    keys: tuple[ErasedKey, ...]
    files: tuple[ErasedFile, ...]
    problems: tuple[Note, ...]
    not_reached: tuple[Note, ...]
    wrapped_keys: tuple[UnwrapRequest, ...] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON document."""
        return {
            "table": self.table,
            "where": {self.placeholder: self.value},
            "paths": self.paths,
            "keys": [key.to_dict() for key in self.keys],
            "files": [asdict(file) for file in self.files],
            "problems": [asdict(note) for note in self.problems],
            "not_reached": [asdict(note) for note in self.not_reached],
        }


class KeysOfValue:
    """The master keys of one value of a placeholder in the names of a table's keys."""

    def __init__(self, keys: KeyService, where: Mapping[str, str], table_name: str | None) -> None:
        if len(where) != 1:
            raise ConfigurationError("an erasure is for one value, such as tenant=acme.")
        ((self.placeholder, self.value),) = where.items()
        self.configuration = keys.configuration
        self.table_name, self.table = self.configuration.select_table(table_name)
        found = keys_of_value(self.configuration, self.table_name, where)
        if keys.kms is None or not found:
            raise ConfigurationError(
                f"no key of the table {self.table_name!r} has the placeholder {{{self.placeholder}}}.",
                hint="Data without keys of its own: remove its rows with `erase --rewrite`.",
            )
        self.kms = keys.kms
        self._fixed = configured_master_key_ids(self.configuration)
        self.ids = {template: reference.master_key_id for template, reference in found.items()}
        self.same: SameMasterKey = same_master_key(self.kms)

    def states(self) -> tuple[ErasedKey, ...]:
        """Return the master keys with their states, in the order of their deletion."""
        # The key of the footer last: until then, a run that was interrupted can authenticate footers.
        ids = sorted(self.ids.items(), key=lambda item: item[0] == self.table.footer_key)
        return tuple(ErasedKey(template, key, self.kms.key_deletion_state(key)) for template, key in ids)

    def of(self, uses: Iterable[UsedKey]) -> list[tuple[UsedKey, str]]:
        """Return the keys of a file that are under these master keys, with the identifier of the configuration."""
        found = ((use, self._own(use.master_key_id)) for use in uses if use.master_key_id is not None)
        return [(use, own) for use, own in found if own is not None]

    def _own(self, master_key_id: str) -> str | None:
        """Return which of these master keys an identifier means; None if none, or if the KMS does not say."""
        if master_key_id in self.ids.values():
            return master_key_id
        return next((own for own in self.ids.values() if self.same(master_key_id, own)), None)

    def cannot_compare(self, master_key_id: str) -> bool:
        """Return whether the KMS does not say whether an identifier means one of these master keys."""
        if self._own(master_key_id) is not None:
            return False
        return any(self.same(master_key_id, own) is None for own in self.ids.values())

    def other_values(self, uses: Iterable[UsedKey]) -> set[str]:
        """Return the other values whose master keys, by these templates, a file names."""
        pattern = self.table.key_values[self.placeholder].pattern
        ids = {use.master_key_id for use in uses if use.master_key_id is not None} - self._fixed
        found = (value_in(self.configuration.master_key_id(template), key) for template in self.ids for key in ids)
        return {value for value in found if value is not None and is_value(pattern, value)} - {self.value}

    def conflicts(self) -> Iterator[str]:
        """Yield why the configuration may use one of these master keys for other data."""
        own = set(self.ids.values())
        for literal in sorted(self._fixed):
            if self._own(literal) is not None:
                yield f"the configuration also names {literal!r}, which is the same master key"
            elif self.cannot_compare(literal):
                yield f"the KMS does not say whether {literal!r} is the same master key"
        for name, table in self.configuration.tables.items():
            for template in dict.fromkeys(template for _, template in table.key_names()):
                if not placeholders(template):
                    continue
                (placeholder,) = placeholders(template)
                pattern = table.key_values[placeholder].pattern
                identifier, is_shared = self.configuration.master_key_id(template), self.is_shared(template)
                others = [key for key in own if not (is_shared and value_in(identifier, key) == self.value)]
                if any(_can_mean(identifier, pattern, key) for key in others):
                    yield f"the key {template!r} of table {name!r} can mean the same master key"

    def is_shared(self, template: str) -> bool:
        """Return whether a template of another table names the same keys: its data of the value is erased, too."""
        return template in self.ids and placeholders(template) == [self.placeholder]


def _can_mean(template: str, pattern: str, master_key_id: str) -> bool:
    """Return whether a value may give a master key; some KMSs ignore case."""
    value = value_in(template, master_key_id)
    if value is not None:
        return is_value(pattern, value)
    return value_in(alike(template), alike(master_key_id)) is not None


class _Notes(dict[str, dict[str, None]]):
    """Text of a note -> its examples."""

    def add(self, text: str, *examples: str) -> None:
        self.setdefault(text, {}).update(dict.fromkeys(examples))

    def all(self) -> tuple[Note, ...]:
        return tuple(Note(text, tuple(examples)) for text, examples in self.items())


OnFile = Callable[[object], None]


class _Planner:
    """Examines a file, or the files of a folder, and their older versions in a versioned bucket of S3."""

    def __init__(self, service: KeyService, keys: KeysOfValue, location: FileLocation) -> None:
        self._keys = keys
        self._location = location
        self._states = keys.states()
        self._inventory = Inventory(service, prefix_of(service, keys.table_name, None))
        self._problems, self._not_reached = _Notes(), _Notes()
        self._files: list[ErasedFile] = []
        # Wrapped key -> the first file with it.
        self._wrapped: dict[UnwrapRequest, str] = {}
        for conflict in keys.conflicts() if not self._is_gone else ():
            self._problems.add(conflict)

    @property
    def _is_gone(self) -> bool:
        return all(key.deletion.is_gone for key in self._states)

    def plan(self, *, ignore_skipped: bool, on_file: OnFile) -> Plan:
        for file in self._inventory.list(self._location, ignore_skipped=ignore_skipped, proves_columns=False):
            self._add(file)
            on_file(file)
        if self._location.is_in_s3:
            self._look_at_versions(on_file)
        if not self._is_gone:
            self._unwrap_all()
        return self._plan()

    def _unwrap_all(self) -> None:
        """Forbid the deletion if the master keys do not unwrap some keys, for example because an alias was moved.

        They would stay readable, and a deleted key unwraps nothing in any case: that would be no proof.
        """
        kms, wanted = self._keys.kms, tuple(self._wrapped)
        kms.trust_also({request.master_key_id for request in wanted})
        with audit.about(self._location):
            answers = kms.unwrap_many(wanted)
        for request, answer in zip(wanted, answers, strict=True):
            if isinstance(answer, KmsUnavailableError):
                raise answer
            if isinstance(answer, KmsError) and not isinstance(answer, GONE):
                text = f"{request.master_key_id!r} does not unwrap keys of some files: {answer.summary}"
                self._problems.add(text, self._wrapped[request])
        for key in self._states:
            if key.deletion.state == "disabled":
                text = "whether a master key that was disabled before is the one that wrapped the keys"
                self._not_reached.add(text, key.master_key_id)

    def _look_at_versions(self, on_file: OnFile) -> None:
        from parquet_keytools.erasure.s3_versions import OlderVersion, older_versions

        pending: list[OlderVersion] = []

        def locations() -> Iterator[FileLocation]:
            for version in older_versions(self._location):
                pending.append(version)
                yield version.location

        try:
            for file in self._inventory.of(self._location, locations()):
                version = pending.pop(0)
                self._add_version(file, version.path, version.version_id)
                on_file(file)
        except OSError as error:
            self._not_reached.add(f"older versions of objects in the bucket, which could not be read: {error}")

    def _add(self, file: FileKeyUses) -> None:
        keys, problems = self._keys, self._problems
        path = escaped_path(file.path)
        folders = values_in_folders(file.path, keys.placeholder)
        under = keys.of(file.uses)
        if file.unknown is not None and not self._is_expected(file, under):
            if isinstance(file.unknown, KmsUnavailableError):
                raise file.unknown
            text = f"the keys that some files need are unknown: {type(file.unknown).__name__}"
            problems.add(text, f"{path}: {str(file.unknown).removeprefix(f'{file.path}: ')}")
            return
        for use in file.uses if not self._is_gone else ():
            if use.master_key_id is not None and keys.cannot_compare(use.master_key_id):
                problems.add(f"the KMS does not say whether {use.master_key_id!r} is the same master key", path)
        if under and folders - {keys.value}:
            problems.add(f"files of another {keys.placeholder} are under the same master key", path)
        if (under or folders == {keys.value}) and keys.other_values(file.uses):
            problems.add(f"files have columns under the keys of more than one {keys.placeholder}", path)
        if under or folders == {keys.value}:
            self._check_columns(file, under, path)
        elif not file.is_encrypted and not folders:
            self._not_reached.add(f"plaintext files, which show no {keys.placeholder}", path)
        if under:
            self._add_erased(file, under, path, None)

    def _add_version(self, file: FileKeyUses, path: str, version_id: str) -> None:
        keys, name = self._keys, f"{escaped_path(path)} (version {version_id})"
        folders, under = values_in_folders(path, keys.placeholder), keys.of(file.uses)
        if under and folders - {keys.value}:
            self._problems.add(
                f"older versions of files of another {keys.placeholder} are under the same key", name
            )
        if file.unknown is not None and not self._is_expected(file, under):
            if path.lower().endswith(".parquet"):
                self._not_reached.add(
                    f"older versions whose keys are unknown: {type(file.unknown).__name__}", name
                )
        elif under:
            self._add_erased(file, under, escaped_path(path), version_id)
        elif folders == {keys.value}:
            self._not_reached.add("older versions that are under other keys, or in plaintext", name)

    def _is_expected(self, file: FileKeyUses, under: Sequence[tuple[UsedKey, str]]) -> bool:
        """Return whether a footer is unreadable only because its master key, one of these, is gone already."""
        gone = {key.master_key_id for key in self._states if key.deletion.is_gone}
        return isinstance(file.unknown, GONE) and any(use.is_footer and own in gone for use, own in under)

    def _check_columns(self, file: FileKeyUses, under: Sequence[tuple[UsedKey, str]], path: str) -> None:
        """Look for columns that should be under these keys according to the table, and are not in the file."""
        keys, templates = self._keys, self._keys.ids
        covered = {use.column for use, _ in under}
        if any(use.is_footer for use, _ in under):
            covered |= set(file.footer_key_columns)
        elif file.is_encrypted and keys.table.footer_key in templates:
            self._problems.add(f"the footers of files of this {keys.placeholder} are under another key", path)
        names = [use.column for use in file.uses if use.column is not None]
        leaves = [tuple(name.split(".")) for name in (*names, *file.plaintext_columns, *file.footer_key_columns)]
        chosen = resolve_columns(
            keys.configuration, keys.table_name, leaves, for_reading=True, may_be_undecided=True
        )
        for leaf, choice in chosen.items():
            name = ".".join(leaf)
            if choice.key_name in templates and name not in covered:
                text = f"column {printable(name)} of this {keys.placeholder} is not under its key in some files"
                self._problems.add(text, path)
        for name in file.plaintext_columns:
            self._not_reached.add("plaintext columns", printable(name))
        if not any(use.is_footer for use, _ in under):
            for name in file.footer_key_columns:
                self._not_reached.add("columns under the key of the footer", printable(name))
        for use in file.uses:
            if use.column is not None and use.column not in covered:
                self._not_reached.add("columns under other keys", printable(use.column))

    def _add_erased(
        self, file: FileKeyUses, under: Sequence[tuple[UsedKey, str]], path: str, version_id: str | None
    ) -> None:
        columns = []
        for use, own in under:
            name = FOOTER if use.is_footer else HIDDEN if use.column is None else use.column
            names = (name, *file.footer_key_columns) if use.is_footer else (name,)
            columns += [ErasedColumn(name, own, use.version) for name in names]
            if use.wrapped_key is not None and use.master_key_id is not None:
                self._wrapped.setdefault(UnwrapRequest(use.wrapped_key, use.master_key_id), path)
        assert file.size_bytes is not None and file.footer_sha256 is not None
        authenticated = file.unknown is None
        self._files.append(
            ErasedFile(path, version_id, file.size_bytes, file.footer_sha256, authenticated, tuple(columns))
        )

    def _plan(self) -> Plan:
        keys = self._keys
        if not self._files and all(key.deletion.state == "deleted" for key in self._states):
            raise ConfigurationError(
                f"the KMS has no master key {next(iter(keys.ids.values()))!r}, and no file here is under it.",
                hint=f"Check the value of {keys.placeholder}, the path and the KMS.",
            )
        for name, table in keys.configuration.tables.items():
            if name == keys.table_name or not any(keys.is_shared(t) for _, t in table.key_names()):
                continue
            self._not_reached.add(
                "files of other tables under the same keys are erased, too, and not listed", name
            )
        used = {column.master_key_id for file in self._files for column in file.columns}
        # A template may be newer or older than this tenant, so not every template has a key.
        states = [k for k in self._states if k.deletion.state != "deleted" or k.master_key_id in used]
        for key in states:
            if key.deletion.state == "deleted":
                text = "the deletion itself, which the log of the KMS shows: the key was gone before this run"
                self._not_reached.add(text, key.master_key_id)
        for text in _never_reached(keys):
            self._not_reached.add(text)
        location = self._location
        return Plan(
            table=keys.table_name,
            placeholder=keys.placeholder,
            value=keys.value,
            paths=tuple(str(location.below(path)) for path in location.only) or (str(location),),
            keys=tuple(states),
            files=tuple(self._files),
            problems=self._problems.all(),
            not_reached=self._not_reached.all(),
            wrapped_keys=tuple(self._wrapped),
        )


def _never_reached(keys: KeysOfValue) -> Iterator[str]:
    """Yield what no deletion of a master key reaches."""
    seconds = max(keys.table.cache_lifetime_seconds, keys.configuration.reading.cache_lifetime_seconds or 0)
    yield f"names of folders and files, which may show the {keys.placeholder}"
    yield f"keys that running processes have in memory, for up to {seconds:g} seconds, or as their cache is set"
    yield "backups of the master key, such as copies of a keystore, of a token, or of the KMS's storage"
    yield "plaintext copies: exports, caches, query results, logs, and files that were decrypted"
    yield "snapshots of Iceberg tables, and copies of other files; copies of the listed files are erased"


# --- the certificate ---


FORMAT = "parquet-keytools erasure certificate"
VERSION = 1
_MOST_SHOWN = 10


@dataclass(frozen=True)
class Proof:
    """Whether a new client of the KMS could unwrap keys of the erased columns.

    Attributes:
        obtained: Whether the KMS refused each of them because the master key is gone.
        at: When, as ISO 8601 in UTC.
        wrapped_keys: How many distinct wrapped keys were tried.
        outcomes: Class of the error, or `unwrapped` -> number of wrapped keys.
        reason: Why it was not obtained; empty if it was.
        unreachable: Whether the KMS could not be reached.
    """

    obtained: bool
    at: str
    wrapped_keys: int
    outcomes: Mapping[str, int]
    reason: str = ""
    unreachable: bool = False


@dataclass(frozen=True)
class Certificate:
    """What was erased, how, when and by whom, and what it does not reach.

    Attributes:
        plan: What was erased, with the master keys after their deletion.
        requested_at: Identifier of a master key -> when this run requested its deletion. A master key that was
            deleted before is missing.
        backends: Identifier of a master key -> name of the KMS client.
        caller: Who ran it.
        proof: See `Proof`.
        started_at: When the run began, as ISO 8601 in UTC.
        finished_at: When it ended.
    """

    plan: Plan
    requested_at: Mapping[str, str]
    backends: Mapping[str, str]
    caller: CallerIdentity
    proof: Proof
    started_at: str
    finished_at: str

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON document."""
        document = self.plan.to_dict()
        del document["problems"]
        for entry in document["keys"]:
            key = entry["master_key_id"]
            entry |= {"kms": self.backends[key], "requested_at": self.requested_at.get(key)}
        document |= {
            "format": FORMAT,
            "version": VERSION,
            "started_at": self.started_at,
            "finished_at": self.finished_at,
            "run_by": self.caller._asdict(),
            "proof": {name: value for name, value in asdict(self.proof).items() if name != "unreachable"},
        }
        # As a JSON reader has it, with lists for tuples.
        read: dict[str, Any] = json.loads(canonical(document))
        return read | {"sha256": hashlib.sha256(canonical(read)).hexdigest()}

    def lines(self) -> Iterator[str]:
        """Yield it as text."""
        plan = self.plan
        yield f"Certificate of erasure: {plan.placeholder}={plan.value} in table {plan.table}"
        yield f"Examined: {', '.join(map(printable, plan.paths))}"
        yield f"Run from {self.started_at} to {self.finished_at}"
        yield f"Run by {printable(self.caller.name)}, according to {self.caller.source}"
        for key in plan.keys:
            yield f"Master key {key.deletion.key} in {self.backends[key.master_key_id]}: {state_text(key)}"
            when = self.requested_at.get(key.master_key_id)
            yield f"  its deletion was requested at {when}" if when else "  it was gone before this run"
        columns = sorted({column.column for file in plan.files for column in file.columns})
        yield f"Erased columns: {_some(columns)}"
        yield f"  files and older versions with them: {len(plan.files):,}"
        proof = self.proof
        counts = ", ".join(f"{name}: {number:,}" for name, number in proof.outcomes.items())
        if proof.obtained:
            yield f"Proof: at {proof.at}, the KMS refused each wrapped key that was tried ({counts})"
        else:
            yield f"Proof NOT obtained: {proof.reason}"
        yield "Not reached by this erasure:"
        for note in plan.not_reached:
            yield f"  - {note.text}" + (f": {_some(note.examples)}" if note.examples else "")


def canonical(document: Mapping[str, Any]) -> bytes:
    """Return the bytes of which `sha256` is the hash."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode("ascii")


def state_text(key: ErasedKey) -> str:
    """Return the state of a master key as text."""
    found = key.deletion
    if found.state == "scheduled":
        when = f" on {found.deletes_at:%Y-%m-%d %H:%M} UTC" if found.deletes_at else ""
        return f"it unwraps nothing, and the KMS deletes it{when}; until then the deletion can be cancelled"
    texts = {"deleted": "the KMS has no such key; this cannot be cancelled", "disabled": "disabled, not deleted"}
    return texts.get(found.state, "usable")


def _some(names: Any) -> str:
    shown = [printable(name) for name in names[:_MOST_SHOWN]]
    return ", ".join([*shown, f"and {len(names) - len(shown):,} more"] if len(names) > len(shown) else shown)


# --- the deletion ---


_MOST_NAMED = 5
_PATIENCE_SECONDS = 60.0
"""AWS takes some seconds until all of its servers refuse a key."""


class Erasure:
    """Erases the data of one value, such as `tenant=acme`, by deleting its master keys; see `Keytools.erasure`."""

    def __init__(
        self,
        keys: KeyService,
        location: FileLocation,
        where: Mapping[str, str],
        table_name: str | None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._service = keys
        self._location = location
        self._keys = KeysOfValue(keys, where, table_name)
        self.sleep = sleep

    @property
    def value(self) -> str:
        """The value, which a caller confirms."""
        return self._keys.value

    def states(self) -> tuple[ErasedKey, ...]:
        """Return the master keys of the value, and whether they are deleted.

        Raises:
            KmsConfigurationError: The KMS client does not delete master keys.
            KmsError: The KMS does not show the state.
        """
        return self._keys.states()

    def cancel(self) -> tuple[ErasedKey, ...]:
        """Cancel the scheduled deletion of the master keys, and return their states.

        Raises:
            KmsConfigurationError: No deletion is scheduled.
            KmsError: The KMS does not cancel it.
        """
        with audit.about(self._location):
            scheduled = [key for key in self.states() if key.deletion.state == "scheduled"] or self.states()
            return tuple(
                replace(key, deletion=self._keys.kms.cancel_key_deletion(key.deletion.key)) for key in scheduled
            )

    def plan(self, *, ignore_skipped: bool = False, on_file: OnFile = lambda _: None) -> Plan:
        """Find what is under the master keys, and what forbids their deletion. Nothing is changed.

        Args:
            ignore_skipped: Whether to leave out encrypted files that readers of data sets ignore because of their
                names.
            on_file: Called with each file.

        Raises:
            ConfigurationError: The KMS has no such master keys, and no file is under them.
            FileNotFoundError: The file or folder does not exist.
            NoParquetFilesError: The folder has no Parquet files.
            KmsError: The KMS cannot be reached, or does not show the state of the master keys.
        """
        planner = _Planner(self._service, self._keys, self._location)
        return planner.plan(ignore_skipped=ignore_skipped, on_file=on_file)

    def run(self, plan: Plan, *, waiting_days: int | None = None) -> Certificate:
        """Delete the master keys, or schedule their deletion, and prove that the KMS unwraps nothing with them.

        Args:
            plan: What `plan` returned.
            waiting_days: Waiting period of the KMS; None for its default.

        Raises:
            ErasureRefusedError: The plan has problems. Nothing was changed.
            KmsError: The KMS refuses, or cannot be reached. Repeat the call.
        """
        if plan.problems:
            texts = "; ".join(note.text for note in plan.problems[:_MOST_NAMED])
            raise ErasureRefusedError(
                f"nothing was erased: {texts}.",
                hint="`erase --dry-run` lists the files; in Python, `problems` of the plan has them.",
            )
        kms, started, first = self._keys.kms, datetime.now(UTC), plan.keys[0].master_key_id
        caller = kms.caller_identity(first)
        done: list[ErasedKey] = []
        requested: dict[str, str] = {}
        with audit.about(self._location):
            for key in plan.keys:
                deletion = key.deletion
                if deletion.is_gone:
                    # It may have been cancelled since the plan was made.
                    deletion = kms.key_deletion_state(deletion.key)
                if not deletion.is_gone:
                    requested[key.master_key_id] = _now()
                    # Not by an alias, which may name another key by now.
                    deletion = kms.schedule_key_deletion(deletion.key, waiting_days)
                if not deletion.is_gone:
                    failure = KmsResponseInvalidError(f"the master key is {deletion.state} after its deletion")
                    raise failure.about(kms.parts(key.master_key_id)[0].backend, "delete", key.master_key_id)
                # A KMS shows no versions of a key that it does not have any more.
                versions = deletion.versions or dict.fromkeys(key.deletion.versions, deletion.state)
                done.append(replace(key, deletion=replace(deletion, versions=versions)))
            proof = self._prove(plan.wrapped_keys)
        return Certificate(
            plan=replace(plan, keys=tuple(done)),
            requested_at=requested,
            backends={key.master_key_id: kms.parts(key.master_key_id)[0].backend for key in done},
            caller=caller,
            proof=proof,
            started_at=started.isoformat(timespec="seconds"),
            finished_at=_now(),
        )

    def _prove(self, wanted: Sequence[UnwrapRequest]) -> Proof:
        """Ask the KMS, with a new client, to unwrap each wrapped key."""
        if not wanted:
            return Proof(False, _now(), 0, {}, "no file is under these keys, so there is no wrapped key to try")
        kms, is_own = self._new_client()
        try:
            kms.trust_also({request.master_key_id for request in wanted})
            pause, end = 1.0, time.monotonic() + _PATIENCE_SECONDS
            while True:
                # Unwrapped keys are dropped at once.
                answers = [a if isinstance(a, KmsError) else None for a in kms.unwrap_many(wanted)]
                if None not in answers or time.monotonic() + pause > end:
                    break
                self.sleep(pause)
                pause *= 2
        finally:
            if is_own:
                kms.close()
        outcomes = Counter("unwrapped" if answer is None else type(answer).__name__ for answer in answers)
        others = [answer for answer in answers if not isinstance(answer, GONE)]
        reason = ""
        if None in others:
            reason = "the KMS still unwraps keys with a master key that it says is deleted: repeat the command"
        elif others:
            reason = f"the KMS did not say that the key is gone: {others[0]}"
        unreachable = any(isinstance(answer, KmsUnavailableError) for answer in others)
        return Proof(not others, _now(), len(wanted), dict(outcomes), reason, unreachable)

    def _new_client(self) -> tuple[KmsClient, bool]:
        """Return a client without memory of earlier calls, and whether it must be closed."""
        settings = self._service.configuration.kms
        if settings is None or self._service.given_kms or getattr(self._keys.kms, "has_generated_keys", False):
            return self._keys.kms, False
        return make_client(settings, self._service.configuration.folder or Path()), True


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
