"""`parquet-keytools keys`, `hash-key` and `tenants`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parquet_keytools.cli import options as opt
from parquet_keytools.cli import output as out

if TYPE_CHECKING:
    from parquet_keytools.files.key_service import TenantKey
    from parquet_keytools.keytools import Keytools
    from parquet_keytools.rotation.inventory import FileKeyUses, UsedKey


@opt.with_options(opt.ReportOptions)
def keys_command(
    paths: opt.PathsArgument,
    config: Path | None = None,
    table: str | None = None,
    aad_prefix: str | None = None,
    fail_if_uses: list[str] | None = None,
    ignore_skipped: bool = False,
) -> None:
    """Show which files and columns depend on which master key.

    Run this before you disable or destroy a key, or a version of a key. Without a configuration no KMS is called:
    column keys inside encrypted footers are not visible, and versions are unknown.

    Options:
        --config FILE or $PARQUET_KEYTOOLS_CONFIG: The YAML configuration: its KMS opens footers that hide keys
            of columns.
        --fail-if-uses KEY[@VERSION]: Exit with 1 if a file needs this master key, or if that is unknown.
            Repeatable.
    """
    from parquet_keytools.keytools import Keytools

    location = opt.locations_of(paths, "PATH")
    with Keytools.from_mapping({"version": 1}) if config is None else Keytools.from_yaml(config) as keytools:
        if table is not None:
            keytools.configuration.select_table(table)
        wanted = [wanted_key(keytools, text) for text in fail_if_uses or []]
        tally = _KeysTally(keytools, wanted)
        with out.FilesDocument() as document:
            with out.progress_bar() as progress:
                for file in keytools.key_inventory(
                    location, table_name=table, aad_prefix=aad_prefix, ignore_skipped=ignore_skipped
                ):
                    progress.count(file)
                    tally.add(file)
                    document.add(
                        {
                            "path": file.path,
                            "encrypted": None if file.is_unseen else file.is_encrypted,
                            "keys": [_without_wrapped_key(use) for use in file.uses],
                            "plaintext_columns": file.plaintext_columns,
                            "footer_key_columns": file.footer_key_columns,
                            "all_keys_seen": file.unknown is None,
                            **out.error_fields(file.unknown),
                        }
                    )
            document.end(tally.document())
    tally.show()
    status = tally.status
    if status is not out.ExitStatus.DONE:
        raise typer.Exit(status)


@opt.with_options()
def hash_key_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the secret in the configuration.")],
    config: Path,
    master_key: str | None = None,
) -> None:
    """Create a secret for `denied_columns: hash`, or re-wrap one.

    Prints the lines for the configuration. If the configuration has a secret of this name, it is re-wrapped, and
    digests stay the same.

    Options:
        --master-key KEY: The master key that wraps the secret. By default, the master key that wraps an
            existing secret.
    """
    from parquet_keytools.config.document import as_yaml

    with opt.open_keytools(config) as keytools:
        is_known = name in keytools.configuration.hash_keys
        made = keytools.wrap_hash_key(name, master_key)
    out.say(
        "This is the same secret, re-wrapped: digests stay the same."
        if is_known
        else "This is a new secret. Keep it: without it, the same digests cannot be made again."
    )
    out.answer(as_yaml({"hash_keys": {name: made.model_dump()}}))


# --- which keys to look for ---


@dataclass
class WantedKey:
    """A master key, or a version of it, that no file should need; and how many do, or may (`unknown`)."""

    key: str
    master_key_id: str
    version: str | None
    needed_by: int = 0
    unknown: int = 0
    example: str = ""

    def add(self, path: str, depends: bool | None) -> None:
        """Count a file."""
        self.unknown += depends is None
        self.needed_by += depends is True
        if depends and not self.example:
            self.example = path


def wanted_key(keytools: Keytools, text: str) -> WantedKey:
    """Return the master key that `KEY[@VERSION]` names; refuse one that does not exist: it would seem unneeded."""
    from parquet_keytools.config.document import did_you_mean, one_of
    from parquet_keytools.errors import ConfigurationError, KmsError, KmsUnavailableError, MasterKeyNotFoundError
    from parquet_keytools.rotation.file_keys import check_version

    names = keytools.configuration.master_keys
    known = None if keytools.kms is None else keytools.kms.master_key_ids()
    name, version = text, None
    if "@" in text and text not in names and text not in (known or ()):
        name, _, version = text.rpartition("@")
    if version == "":
        # Probably an unset shell variable.
        raise ConfigurationError(f"{text!r} names no version.", hint="Leave out the `@` to mean all versions.")
    if name in keytools.configuration.data_keys and name not in names:
        raise ConfigurationError(
            f"{name!r} is a data key, not a master key.", hint="`keys` without it shows which files have it."
        )
    master_key_id = keytools.configuration.master_key_id(name)
    if known is not None and master_key_id not in known:
        hint = did_you_mean(name, {*known, *names}) or one_of(known)
        raise ConfigurationError(f"the KMS has no master key {master_key_id!r}.", hint=hint)
    if keytools.kms is not None and (known is None or version is not None):
        newest = None
        try:
            newest = keytools.kms.describe(master_key_id).current_version
        except MasterKeyNotFoundError as error:
            raise ConfigurationError(str(error)) from None
        except KmsUnavailableError:
            raise
        except KmsError:
            # A caller without the right to describe the key can still compare it with the files.
            pass
        if version is not None:
            check_version(name, version, newest)
    return WantedKey(text, master_key_id, version)


# --- the results of `keys` ---


_MOST_COLUMNS_KEPT = 10_000
_MOST_COLUMNS_SHOWN = 8


@dataclass
class _Uses:
    """The uses of a version of a key."""

    kind: str
    key: str
    version: str | None
    files: int = 0
    footers: int = 0
    columns: dict[str, None] = field(default_factory=dict)
    hidden_columns: int = 0

    def add(self, use: UsedKey) -> None:
        if use.is_footer:
            self.footers += 1
        elif use.column is None:
            self.hidden_columns += 1
        elif len(self.columns) < _MOST_COLUMNS_KEPT:
            self.columns[use.column] = None

    def row(self) -> tuple[str | int, ...]:
        """Return what `grouped_rows` takes."""
        is_master_key = self.kind == "master key"
        columns = list(filter(None, [_some(self.columns)]))
        if self.hidden_columns:
            columns.append(f"{self.hidden_columns:,} whose names are hidden")
        name = self.key if is_master_key else f"{self.key} ({self.kind})"
        version = self.version or ("?" if is_master_key else "")
        return name, version, self.files, self.footers, ", ".join(columns)


def _some(names: Collection[str]) -> str:
    """Return the first names, and how many more there are."""
    shown = list(islice(names, _MOST_COLUMNS_SHOWN))
    if len(names) > len(shown):
        shown.append(f"and {len(names) - len(shown):,} more")
    return ", ".join(shown)


class _KeysTally:
    """Counts the keys that files depend on, file by file."""

    def __init__(self, keytools: Keytools, wanted: list[WantedKey]) -> None:
        from parquet_keytools.rotation.file_keys import same_master_key

        self._wanted = wanted
        self._same = same_master_key(keytools.kms)
        self._template_of = keytools.configuration.template_of
        self._with_kms = keytools.kms is not None
        self._refusals: dict[type[Exception], Exception] = {}
        self._uses: dict[tuple[str, str, str | None], _Uses] = {}
        names = ("encrypted", "not_encrypted", "unknown_keys", "unreadable", "skipped")
        self._counts = dict.fromkeys(names, 0)
        self._misplaced = 0
        self._plaintext_columns: Counter[str] = Counter()
        self._plaintext_files = out.Messages("Not encrypted", out.answer)
        self._skipped_paths: list[str] = []
        self._unknown = out.Messages("Keys unknown", out.answer)
        self._skipped = out.Messages("Skipped, as by readers of data sets", out.answer)

    @property
    def _has_gaps(self) -> bool:
        """Whether a file could not be checked, readers skip an encrypted file, or they refuse a folder."""
        return bool(self._counts["unreadable"] or self._skipped_paths or self._misplaced)

    @property
    def status(self) -> out.ExitStatus:
        """The exit status: of the KMS if it could not be reached, or if nothing else is wrong."""
        from parquet_keytools.errors import KmsUnavailableError

        if KmsUnavailableError in self._refusals:
            return out.ExitStatus.KMS_FAILED
        if self._has_gaps or any(key.needed_by or key.unknown for key in self._wanted):
            return out.ExitStatus.NO
        return out.status_of_all([*self._refusals.values()]) if self._refusals else out.ExitStatus.DONE

    def add(self, file: FileKeyUses) -> None:
        """Count the keys of a file."""
        from parquet_keytools.errors import FolderNameError

        counts = self._counts
        if not file.is_encrypted:
            counts["not_encrypted"] += 1
            self._plaintext_files.add(file.path, f"{file.path}: the whole file is plaintext.")
            return
        if file.is_skipped:
            counts["skipped"] += 1
            self._skipped_paths.append(file.path)
            self._skipped.add(file.path, f"{file.path} may need any key.")
        elif file.is_unseen:
            counts["unreadable"] += 1
        else:
            counts["encrypted"] += 1
            counts["unknown_keys"] += file.unknown is not None
            # Without a configuration, keys inside encrypted footers are not asked for.
            if file.unknown is not None and self._with_kms:
                self._refusals.setdefault(type(file.unknown), file.unknown)
            self._misplaced += isinstance(file.unknown, FolderNameError)
        if file.unknown is not None and not file.is_skipped:
            self._unknown.add_error(file.path, file.unknown)
        for column in file.plaintext_columns:
            if column in self._plaintext_columns or len(self._plaintext_columns) < _MOST_COLUMNS_KEPT:
                self._plaintext_columns[column] += 1
        for key in self._wanted:
            key.add(file.path, file.depends_on(key.master_key_id, key.version, self._same))
        names = [(use, _name(use)) for use in file.uses]
        for use, name in names:
            self._uses.setdefault(name, _Uses(*name)).add(use)
        for name in dict.fromkeys(name for _, name in names):
            self._uses[name].files += 1

    def document(self) -> dict[str, Any]:
        """Return the summary as JSON."""
        return {
            "complete": not (self._has_gaps or self._refusals),
            "master_keys": [out.to_dict(uses) | {"columns": list(uses.columns)} for uses in self._sorted()],
            "plaintext_columns": self._plaintext_columns,
            "counts": self._counts,
            "skipped": self._skipped_paths,
            "fail_if_uses": self._wanted,
        }

    def show(self) -> None:
        """Print the summary."""
        if self._uses:
            rows = out.grouped_rows((uses.row() for uses in self._sorted()), self._template_of)
            out.print_table("Keys", ["master key", "version", "files", "footers", "columns"], rows)
        if self._plaintext_columns:
            out.answer(f"Plaintext columns of encrypted files: {_some(self._plaintext_columns)}")
        self._plaintext_files.print()
        self._unknown.print()
        self._skipped.print()
        counts = self._counts
        rest = "all keys of the others are visible." if counts["unreadable"] else "all keys are visible."
        if counts["unknown_keys"]:
            rest = f"in {counts['unknown_keys']:,} some keys could not be checked."
        elif self._skipped_paths:
            rest = f"{len(self._skipped_paths):,} skipped."
        unreadable = f", {counts['unreadable']:,} that could not be checked" if counts["unreadable"] else ""
        files = out.number_of(counts["encrypted"], "encrypted file")
        out.answer(f"{files}, {counts['not_encrypted']:,} not encrypted{unreadable}; {rest}")
        for key in self._wanted:
            if key.needed_by:
                files = out.number_of(key.needed_by, "file")
                out.answer(f"{key.key} is still needed by {files}, such as {key.example}.")
            if key.unknown:
                files = out.number_of(key.unknown, "file")
                out.answer(f"For {files} it is unknown whether {key.key} is needed: assume that it is.")
            if not key.needed_by and not key.unknown:
                out.answer(f"Nothing here needs {key.key}.")
        if self._skipped_paths and self._wanted:
            out.answer("Run `keys` on skipped files themselves, or exclude them with --ignore-skipped.")

    def _sorted(self) -> list[_Uses]:
        return sorted(self._uses.values(), key=lambda uses: (uses.kind, uses.key, uses.version or ""))


def _without_wrapped_key(use: UsedKey) -> dict[str, Any]:
    return {name: value for name, value in out.to_dict(use).items() if name != "wrapped_key"}


def _name(use: UsedKey) -> tuple[str, str, str | None]:
    """Return kind, name and version of a key."""
    if use.master_key_id is not None:
        return "master key", use.master_key_id, use.version
    return "data key", use.data_key or "", None


# --- tenants ---


tenants_app = typer.Typer(
    name="tenants", help="Create the master keys of tenants in the KMS.", no_args_is_help=True
)


@tenants_app.callback()
def _tenants() -> None:
    """Create the master keys of tenants in the KMS."""


@tenants_app.command()
@opt.with_options()
def create(
    values: Annotated[list[str], typer.Argument(metavar="VALUE", help="Values of the placeholder.")],
    config: Path,
    table: str | None = None,
    placeholder: str | None = None,
    template: Path | None = None,
    json: bool = False,
) -> None:
    """Create the master keys of values, as the templates of a table name them.

    A master key that exists stays as it is. After an error, repeat the command.

    Options:
        --placeholder NAME: The placeholder, if the table has several.
        --template FILE: A YAML or JSON file with the `tags` and the `policy` of new keys, as far as the KMS
            has them. The placeholder in braces stands for the value.
    """
    given = {} if template is None else _template(template)
    found: list[TenantKey] = []

    def on_key(key: TenantKey) -> None:
        found.append(key)
        if not out.json_wanted():
            out.answer(f"{key.value}: {'created' if key.created else 'exists'}: {key.master_key_id}")

    try:
        with opt.open_keytools(config) as keytools:
            keytools.create_tenant_keys(values, table_name=table, placeholder=placeholder, on_key=on_key, **given)
    finally:
        if out.json_wanted():
            out.print_json([out.to_dict(key) for key in found])


def _template(file: Path) -> dict[str, Any]:
    """Return the tags and the policy in a file."""
    from parquet_keytools.config.document import UnreadableYamlError, read_yaml
    from parquet_keytools.errors import ConfigurationError

    try:
        document = read_yaml(file.read_bytes())
    except UnreadableYamlError as error:
        raise ConfigurationError(f"it is not valid YAML: {error}", file=str(file)) from None
    found: dict[str, Any] = document.value
    is_valid = (
        not document.mistakes
        and isinstance(found, dict)
        and found.keys() <= {"tags", "policy"}
        and all(isinstance(part, dict) for part in found.values())
        and all(isinstance(tag, str) for tag in found.get("tags", {}).values())
    )
    if not is_valid:
        raise ConfigurationError(
            "it is not a template of master keys.",
            file=str(file),
            hint="It has `tags`, a mapping of names to texts, and `policy`, a mapping; both can be left out.",
        )
    return found
