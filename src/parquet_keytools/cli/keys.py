"""`parquet-keytools keys` and `hash-key`."""

# Nothing slow is imported here: `--help` has to answer at once.
from __future__ import annotations

import errno
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parquet_keytools.cli.options import (
    AadPrefixOption,
    ConfigOption,
    IgnorePassedOverOption,
    JsonOption,
    PathsArgument,
    TableOption,
    config_option,
    locations_of,
)
from parquet_keytools.cli.output import (
    ExitStatus,
    FilesDocument,
    answer,
    error_fields,
    failure_text,
    file_counter,
    number_of,
    print_table,
    say,
)

if TYPE_CHECKING:
    from parquet_keytools.keytools import Keytools
    from parquet_keytools.rotation.inventory import FileKeyUses, UsedKey
    from parquet_keytools.rotation.rotation_plan import SameMasterKey

KeysConfigOption = Annotated[
    Path | None, config_option("The YAML configuration: its KMS opens footers that hide keys of columns.")
]
FailIfUsesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-if-uses",
        metavar="KEY[@VERSION]",
        help="Exit with 1 if a file needs this master key, or if that is unknown. Repeatable.",
    ),
]


def keys_command(
    paths: PathsArgument,
    config: KeysConfigOption = None,
    table: TableOption = None,
    aad_prefix: AadPrefixOption = None,
    fail_if_uses: FailIfUsesOption = None,
    ignore_passed_over: IgnorePassedOverOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show which files and columns depend on which master key.

    Run this before you disable or destroy a key, or a version of one. Without a configuration no KMS is called, so
    column keys inside encrypted footers are not visible, and versions are unknown.
    """
    from parquet_keytools.keytools import Keytools
    from parquet_keytools.rotation.rotation_plan import same_master_key

    location = locations_of(paths, "PATH")
    with Keytools.from_mapping({"version": 1}) if config is None else Keytools.from_yaml(config) as keytools:
        if table is not None:
            keytools.configuration.select_table(table)
        wanted = [wanted_key(keytools, text) for text in fail_if_uses or []]
        tally = KeysTally(wanted, same_master_key(keytools.kms))
        with FilesDocument(wanted=as_json) as document:
            try:
                with file_counter() as count:
                    for file in keytools.key_inventory(
                        location, table_name=table, aad_prefix=aad_prefix, ignore_passed_over=ignore_passed_over
                    ):
                        count(file)
                        tally.add(file)
                        if as_json:
                            document.add(key_uses_document(file))
            except FileNotFoundError as error:
                if len(paths) > 1:
                    raise
                raise FileNotFoundError(errno.ENOENT, "no such file or folder", paths[0]) from error
            document.end(tally.document())
    tally.tell()
    if not (tally.nothing_is_used and tally.is_complete):
        raise typer.Exit(ExitStatus.NO)


NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the secret in the configuration.")]
MasterKeyOption = Annotated[
    str | None,
    typer.Option(
        "--master-key",
        metavar="KEY",
        help="The master key that wraps the secret. Otherwise, for a secret that is there, the one that it has.",
    ),
]


def hash_key_command(name: NameArgument, config: ConfigOption, master_key: MasterKeyOption = None) -> None:
    """Make a secret for `denied_columns: hash`, or re-wrap one.

    Prints the lines for the configuration. A secret that the configuration has under this name is re-wrapped, and
    digests stay the same; otherwise it is a new one.
    """
    import json

    from parquet_keytools.cli.file_work import open_keytools

    with open_keytools(config) as keytools:
        is_known = name in keytools.configuration.hash_keys
        made = keytools.wrap_hash_key(name, master_key)
    say(
        "This is the same secret, re-wrapped: digests stay the same."
        if is_known
        else "This is a new secret. Keep it: without it, no digest can be made again."
    )
    # Texts of JSON are texts of YAML.
    lines = [
        "hash_keys:",
        f"  {json.dumps(name)}:",
        f"    master_key: {json.dumps(made.master_key)}",
        f"    wrapped_key: {json.dumps(made.wrapped_key)}",
    ]
    answer("\n".join(lines))


# --- the report of `keys` ---


_MOST_COLUMNS_KEPT = 10_000
_MOST_COLUMNS_SHOWN = 8
_MOST_FILES_SHOWN = 20
_MOST_PASSED_OVER_SHOWN = 20


@dataclass(frozen=True)
class WantedKey:
    """A master key, or a version of it, that nothing is to need."""

    text: str
    master_key_id: str
    version: str | None


def wanted_key(keytools: Keytools, text: str) -> WantedKey:
    """Return the master key that `KEY[@VERSION]` means.

    Raises:
        ConfigurationError: The KMS has no such master key or version, or it is a data key, or the version is left
            out after the `@`: nothing would seem to need it.
    """
    from parquet_keytools.config.document import did_you_mean, one_of
    from parquet_keytools.errors import ConfigurationError, KmsError, MasterKeyNotFoundError
    from parquet_keytools.rotation.rotation_plan import check_version

    names = keytools.configuration.master_keys
    known = None if keytools.kms is None else keytools.kms.master_key_ids()
    key, at, version = text.rpartition("@")
    is_whole = not at or text in names or text in (known or ())
    name = text if is_whole else key
    if not is_whole and not version:
        # Such as of a variable that is not set.
        raise ConfigurationError(f"{text!r} names no version.", hint="Leave out the `@` to mean all versions.")
    master_key_id = names.get(name, name)
    if name in keytools.configuration.data_keys and name not in names:
        raise ConfigurationError(
            f"{name!r} is a data key, not a master key.", hint="`keys` without it shows which files have it."
        )
    if known is not None and master_key_id not in known:
        hint = did_you_mean(name, {*known, *names}) or one_of(known)
        raise ConfigurationError(f"the KMS has no master key {master_key_id!r}.", hint=hint)
    wanted_version = None if is_whole else version
    if keytools.kms is not None and (known is None or wanted_version is not None):
        newest = None
        try:
            newest = keytools.kms.describe(master_key_id).current_version
        except MasterKeyNotFoundError as error:
            raise ConfigurationError(str(error)) from None
        except KmsError:
            # Who may not describe it may well ask; what files say of it is compared in any case.
            pass
        if wanted_version is not None:
            check_version(name, wanted_version, newest)
    return WantedKey(text, master_key_id, wanted_version)


def key_uses_document(file: FileKeyUses) -> dict[str, Any]:
    """Return the keys of a file as a document of JSON."""
    return {
        "path": file.path,
        "encrypted": file.is_encrypted,
        "keys": [asdict(use) for use in file.uses],
        "all_keys_seen": file.unknown is None,
        **error_fields(file.unknown),
    }


@dataclass
class _Uses:
    """What depends on a version of a key."""

    files: int = 0
    footers: int = 0
    columns: dict[str, None] = field(default_factory=dict)
    hidden: int = 0

    def add(self, use: UsedKey) -> None:
        if use.is_footer:
            self.footers += 1
        elif use.column is None:
            self.hidden += 1
        elif len(self.columns) < _MOST_COLUMNS_KEPT:
            self.columns[use.column] = None

    @property
    def columns_text(self) -> str:
        names = list(self.columns)
        shown = names[:_MOST_COLUMNS_SHOWN]
        if len(names) > len(shown):
            shown.append(f"and {len(names) - len(shown):,} more")
        if self.hidden:
            shown.append(f"{self.hidden:,} whose names are hidden")
        return ", ".join(shown)


@dataclass
class _Need:
    """Which files need a wanted key."""

    needed_by: int = 0
    uncertain: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, path: str, depends: bool | None) -> None:
        if depends is False:
            return
        if depends:
            self.needed_by += 1
        else:
            self.uncertain += 1
        if len(self.examples) < 3:
            self.examples.append(path)


class KeysTally:
    """Counts which keys files depend on, one by one."""

    def __init__(self, wanted: list[WantedKey], same: SameMasterKey) -> None:
        self._same = same
        self._needs = {key: _Need() for key in wanted}
        self._uses: dict[tuple[str, str, str | None], _Uses] = {}
        self._encrypted = self._plaintext = self._not_all_seen = self._not_looked_into = 0
        self._passed_over = self._misplaced = 0
        self._passed_over_examples: list[str] = []
        self._unseen: list[str] = []

    @property
    def nothing_is_used(self) -> bool:
        """Whether it is certain that no file needs a wanted key."""
        return not any(need.needed_by or need.uncertain for need in self._needs.values())

    @property
    def is_complete(self) -> bool:
        """Whether all files could be checked, no encrypted one is skipped, and none is where readers refuse it."""
        return not (self._not_looked_into or self._passed_over or self._misplaced)

    def add(self, file: FileKeyUses) -> None:
        """Count the keys of a file."""
        from parquet_keytools.errors import FolderNameError

        if not file.is_encrypted:
            self._plaintext += 1
            return
        if file.is_passed_over:
            self._passed_over += 1
            if len(self._passed_over_examples) < _MOST_PASSED_OVER_SHOWN:
                self._passed_over_examples.append(file.path)
        elif file.is_unseen:
            self._not_looked_into += 1
        else:
            self._encrypted += 1
            self._misplaced += isinstance(file.unknown, FolderNameError)
        for key, need in self._needs.items():
            need.add(file.path, file.depends_on(key.master_key_id, key.version, self._same))
        seen = set()
        for use in file.uses:
            name = _name(use)
            uses = self._uses.setdefault(name, _Uses())
            uses.add(use)
            uses.files += name not in seen
            seen.add(name)
        if file.unknown is not None and not file.is_passed_over:
            self._not_all_seen += 1
            if len(self._unseen) < _MOST_FILES_SHOWN:
                self._unseen.append(failure_text(file.path, file.unknown))

    def document(self) -> dict[str, Any]:
        """Return the summary as a document of JSON."""
        return {
            "complete": self.is_complete,
            "master_keys": [
                {
                    "kind": kind,
                    "key": key,
                    "version": version,
                    "files": uses.files,
                    "footers": uses.footers,
                    "columns": list(uses.columns),
                    "hidden_columns": uses.hidden,
                }
                for (kind, key, version), uses in self._sorted()
            ],
            "counts": {
                "encrypted": self._encrypted,
                "not_encrypted": self._plaintext,
                "not_all_keys_seen": self._not_all_seen,
                "not_looked_into": self._not_looked_into,
                "passed_over": self._passed_over,
            },
            "passed_over": self._passed_over_examples,
            "fail_if_uses": [
                {
                    "key": key.text,
                    "master_key_id": key.master_key_id,
                    "version": key.version,
                    "needed_by": need.needed_by,
                    "unknown": need.uncertain,
                }
                for key, need in self._needs.items()
            ],
        }

    def tell(self) -> None:
        """Tell people the summary."""
        rows = [
            (
                key if kind == "master key" else f"{key} ({kind})",
                version or ("?" if kind == "master key" else ""),
                f"{uses.files:,}",
                f"{uses.footers:,}",
                uses.columns_text,
            )
            for (kind, key, version), uses in self._sorted()
        ]
        if rows:
            print_table("Keys", ["master key", "version", "files", "footers", "columns"], rows)
        for text in self._unseen:
            answer(f"Keys unknown: {text}")
        if self._not_all_seen > len(self._unseen):
            answer(f"Keys unknown: {self._not_all_seen - len(self._unseen):,} more; --json lists all.")
        for path in self._passed_over_examples:
            answer(f"Skipped, as by readers of data sets; may need any key: {path}")
        if self._passed_over > len(self._passed_over_examples):
            answer(f"Skipped: {self._passed_over - len(self._passed_over_examples):,} more.")
        unseen = f", {self._not_looked_into:,} that could not be checked" if self._not_looked_into else ""
        answer(
            f"{number_of(self._encrypted, 'encrypted file')}, {self._plaintext:,} not encrypted{unseen}; "
            + (
                f"in {self._not_all_seen:,} some keys could not be checked."
                if self._not_all_seen
                else "all keys are visible."
                if not self._passed_over
                else f"{self._passed_over:,} skipped."
            )
        )
        for key, need in self._needs.items():
            _tell_need(key, need)
        if self._passed_over and self._needs:
            answer("Run `keys` on skipped files themselves, or exclude them with --ignore-passed-over.")

    def _sorted(self) -> list[tuple[tuple[str, str, str | None], _Uses]]:
        return sorted(self._uses.items(), key=lambda item: tuple(part or "" for part in item[0]))


def _tell_need(key: WantedKey, need: _Need) -> None:
    if need.needed_by:
        files = number_of(need.needed_by, "file")
        answer(f"{key.text} is still needed by {files}, such as {need.examples[0]}.")
    if need.uncertain:
        files = number_of(need.uncertain, "file")
        answer(f"For {files} it is unknown whether {key.text} is needed: assume that it is.")
    if not need.needed_by and not need.uncertain:
        answer(f"Nothing here needs {key.text}.")


def _name(use: UsedKey) -> tuple[str, str, str | None]:
    if use.master_key_id is not None:
        return "master key", use.master_key_id, use.version
    return "data key", use.data_key or "", None
