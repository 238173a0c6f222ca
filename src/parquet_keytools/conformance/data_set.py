"""The files of a folder checked as one data set, with parts numbered by AAD prefixes or by names (spec 4.4.1).

A data set of plain files does not say which files belong to it. A list does, authenticated by an HMAC whose key a
master key wraps: with it, `verify` also finds files that were removed, added, exchanged or put back in an older
version.
"""

from __future__ import annotations

import hmac
import json
import os
import re
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import PurePosixPath
from typing import Any

from parquet_keytools import audit
from parquet_keytools.conformance.file_keys import SharedNonces, TableFiles
from parquet_keytools.conformance.file_verifier import FileEnd, FileFacts
from parquet_keytools.conformance.report import FILE_SCOPES, DataSetReport, FileReport, RuleBook, Scope
from parquet_keytools.encryption.footer import FooterEnvelope, read_envelope
from parquet_keytools.encryption.protection import FooterMode
from parquet_keytools.errors import (
    ConfigurationError,
    FileListError,
    KeyMaterialError,
    KeytoolsError,
    ParquetFormatError,
)
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.opened_file import open_files
from parquet_keytools.format.file_layout import MAGIC, MAGIC_ENCRYPTED_FOOTER
from parquet_keytools.keys.key_material import KeyMaterial, KeyReference, parse_key_metadata
from parquet_keytools.keys.material_store import named_parquet_file, read_key_materials
from parquet_keytools.runtime.presentation import escaped_path, printable
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation, open_source, read_whole
from parquet_keytools.storage.outputs import write_whole
from parquet_keytools.storage.walk import (
    Entry,
    LeftOut,
    LeftOutReason,
    ParquetFile,
    Unseen,
    data_set,
)

_PART = re.compile(r"part[-_.]?(\d{1,9})", re.IGNORECASE)
_RUN = re.compile(r"\d{1,9}")
_MARKED = re.compile(r"part[-_.]?#", re.IGNORECASE)
_CHUNK_OF_TASK = re.compile(r"[-.]c\d{3}(?=[-.]|$)")
"""Spark numbers the files of one task too; the next task begins at 000 again."""

_MOST_SHOWN = 20
_MOST_NUMBERS = 1_000_000
"""Greater numbers are dates or the like."""


PartName = Sequence[str]
"""The texts that may hold the number of a part: what authenticated modules vouch for first, the file name last."""


def part_number(name: PartName) -> tuple[str, int] | None:
    """Return a name with `#` for the number of its part, and the number: after the word `part`, else the first."""
    for text in name:
        if matches := list(_PART.finditer(text)):
            return _numbered(text, *matches[-1].span(1))
    match = _RUN.search(name[-1])
    return None if match is None else _numbered(name[-1], *match.span())


def _numbered(text: str, start: int, end: int) -> tuple[str, int]:
    return _CHUNK_OF_TASK.sub("", f"{text[:start]}#{text[end:]}"), int(text[start:end])


def missing_parts(names: Iterable[PartName]) -> Iterator[tuple[str, list[int]]]:
    """Yield the names with gaps in their numbers, and the first missing numbers.

    Numbers that the word `part` does not mark are looked at only where they begin at 0 or 1 and are dense.
    """
    numbers: defaultdict[str, set[int]] = defaultdict(set)
    for found in map(part_number, names):
        if found is not None:
            numbers[found[0]].add(found[1])
    for template, present in numbers.items():
        least, greatest = min(present), max(present)
        if _MARKED.search(template):
            least = 0
        elif least > 1 or greatest >= 2 * len(present):
            continue
        if greatest < _MOST_NUMBERS:
            missing = (number for number in range(least, greatest) if number not in present)
            if shown := list(islice(missing, _MOST_SHOWN + 1)):
                yield template, shown


def _part_name(member: FileFacts) -> PartName:
    prefix = member.aad_prefix
    texts = [member.name] if prefix is None else [prefix.decode("utf-8", "replace"), member.name]
    return [text.rpartition("/")[2] for text in texts]


def folder_report(
    folder: FileLocation,
    reports: Sequence[FileReport],
    members: Sequence[FileFacts],
    nonces: SharedNonces,
    entries: Sequence[Entry],
    *,
    part_count: int | None = None,
    not_attempted: Sequence[FileLocation] = (),
    allow_plaintext: Collection[str] = (),
    expected: Mapping[str, ListedFile] | None = None,
    tables: TableFiles | None = None,
) -> DataSetReport:
    """Check what was found in the files of a folder, wherever that was, and what else is in it.

    `allow_plaintext` has globs of paths within the folder of plaintext files that are accepted; `part_count` is
    how many parts there must be, numbered from 0, and `expected` the list of files, if they are known.
    """
    book, tables = RuleBook([Scope.DATA_SET]), tables or TableFiles()
    left_out = [entry for entry in entries if isinstance(entry, LeftOut)]
    encrypted = [member for member in members if member.is_encrypted]
    _check_distinct(
        "file-copied", ((member.name, [member.file_unique]) for member in encrypted), "file unique", book
    )
    _check_distinct(
        "prefix-shared", ((member.name, [member.aad_prefix]) for member in encrypted), "AAD prefix", book
    )
    _check_keys(encrypted, nonces, book)
    for member in members:
        if member.mode is FooterMode.UNENCRYPTED and not matches_any(member.name, allow_plaintext):
            book.broken("plaintext-among", f"{member.name} is not encrypted.")
    book.holds("plaintext-among", "plaintext-skipped", "other-data")
    _check_left_out(folder, members, left_out, tables, allow_plaintext, book)
    _check_summaries(folder, left_out, members, book)
    if part_count is None:
        _check_gaps(members, book)
    else:
        _check_parts(members, part_count, book)
    _check_columns(members, book)
    if expected is not None:
        _check_list(expected, members, [location.path_within(folder) for location in not_attempted], book)
    return DataSetReport(
        str(folder),
        (*reports, *(unreadable(entry.path, entry.reason) for entry in entries if isinstance(entry, Unseen))),
        book.results(),
        {left.path: left.reason for left in left_out if left.reason is not LeftOutReason.KEY_MATERIAL_BESIDE},
        tuple(map(str, not_attempted)),
        tables.kms_is_unavailable,
    )


def unreadable(path: str, reason: str) -> FileReport:
    """Return the report on a file of which nothing can be said."""
    book = RuleBook(FILE_SCOPES)
    for scope in FILE_SCOPES:
        book.scope_not_checked(scope, f"the file cannot be read: {reason}")
    return FileReport(path, True, book.results())


def _check_keys(encrypted: Sequence[FileFacts], nonces: SharedNonces, book: RuleBook) -> None:
    """Check what DEKs were used for; the rules do not pass if some are unknown."""
    unknown: dict[str, list[str]] = defaultdict(list)
    for member in encrypted:
        if member.unknown is not None:
            unknown[member.unknown].append(member.name)
    for reason, names in unknown.items():
        who = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        for rule_id in ("dek-shared", "nonce-shared", "invocations-shared"):
            book.not_checked(rule_id, f"{who}: {reason}")
    _check_distinct("dek-shared", ((member.name, member.dek_fingerprints) for member in encrypted), "DEK", book)
    nonces.check(book)


def _check_left_out(
    folder: FileLocation,
    members: Sequence[FileFacts],
    left_out: Sequence[LeftOut],
    tables: TableFiles,
    allow_plaintext: Collection[str],
    book: RuleBook,
) -> None:
    verified = {m.name: m.refers_to_material_file for m in members if m.mode is not None}
    for left in left_out:
        location, reason = left.location, left.reason
        if reason is LeftOutReason.SUMMARY or location.path in tables.metadata_files:
            continue
        name = escaped_path(location.path_within(folder))
        may_be_key_material = reason in (LeftOutReason.KEY_MATERIAL, LeftOutReason.KEY_MATERIAL_BESIDE)
        parquet_file = named_parquet_file(location) if may_be_key_material else None
        unread = tables.not_checked.get(location.path)
        try:
            if parquet_file is None:
                kind = _plaintext_kind(location)
            elif not _is_key_material(parquet_file):
                kind = "JSON that is not key material"
            elif reason is LeftOutReason.KEY_MATERIAL:
                kind = None
                book.broken("part-missing", f"{location.name} is the key material of a missing file.")
            else:
                refers = verified.get(parquet_file.path_within(folder))
                is_used = _refers_to_material_file(parquet_file) if refers is None else refers
                kind = None if is_used else f"JSON that {escaped_path(parquet_file.name)} does not refer to"
        except (FileNotFoundError, ParquetFormatError):
            # A dangling link, or no regular file.
            continue
        except OSError as error:
            kind, unread = None, f"it cannot be read: {error.strerror or type(error).__name__}"
        if matches_any(name, allow_plaintext):
            continue
        if kind == _PLAINTEXT_PARQUET:
            book.broken("plaintext-skipped", f"{name} begins as a plaintext file does.")
        elif unread is not None:
            book.not_checked("plaintext-skipped", f"{name}: {unread}")
        elif kind is not None:
            message = f"{name} is {kind}, in plaintext"
            if is_table_metadata(location):
                refused = tables.refused.get(location.path, _WITHOUT_KMS)
                message += f", and not known as metadata of an Iceberg table: {refused}"
            book.broken("other-data", f"{message}.")


def _check_summaries(
    folder: FileLocation, left_out: Sequence[LeftOut], members: Sequence[FileFacts], book: RuleBook
) -> None:
    names = {member.name for member in members}
    is_encrypted = any(member.is_encrypted for member in members)
    if is_encrypted:
        book.holds("summary-file")
    for summary in (left.location for left in left_out if left.reason is LeftOutReason.SUMMARY):
        # Dask writes one without rows, which is encrypted like any other file.
        if is_encrypted and not _is_encrypted(summary):
            book.broken("summary-file", f"{summary.name} is beside encrypted files.")
        for name in _listed_files(folder, summary):
            book.check("part-listed", name in names, f"{name} is listed, and it is not there.")


def matches_any(name: str, globs: Iterable[str]) -> bool:
    """Return whether one of some globs matches a path within a folder; `*` matches `/`, too."""
    return any(fnmatchcase(name, glob) for glob in globs)


def _check_distinct(
    rule_id: str, names: Iterable[tuple[str, Iterable[Hashable]]], what: str, book: RuleBook
) -> None:
    """Check that no two files have the same value."""
    owners: dict[Hashable, list[str]] = defaultdict(list)
    for name, values in names:
        for value in values:
            if value is not None:
                owners[value].append(name)
    for files in owners.values():
        if len(files) > 1:
            shown = ", ".join(files[:5]) + (f" and {len(files) - 5} more" if len(files) > 5 else "")
            book.broken(rule_id, f"these files have the same {what}: {shown}.")
    if owners:
        book.holds(rule_id)


def _check_gaps(members: Sequence[FileFacts], book: RuleBook) -> None:
    for template, missing in missing_parts(_part_name(member) for member in members):
        book.broken("part-gap", f"there are no parts {_shown(missing)} of {template!r}.")
    if any(part_number(_part_name(member)) is not None for member in members):
        book.holds("part-gap")


def _check_parts(members: Sequence[FileFacts], part_count: int, book: RuleBook) -> None:
    names: dict[int, list[str]] = defaultdict(list)
    strangers: list[str] = []
    for member in members:
        found = part_number(_part_name(member))
        if found is None or found[1] >= part_count:
            strangers.append(member.name)
        else:
            names[found[1]].append(member.name)
    missing = list(islice((ordinal for ordinal in range(part_count) if ordinal not in names), _MOST_SHOWN + 1))
    book.check("part-missing", not missing, f"of {part_count} parts, these are missing: {_shown(missing)}.")
    message = f"these are none of {part_count} parts: {', '.join(strangers[:5])}."
    book.check("part-doubled", not strangers, message)
    for ordinal, files in names.items():
        message = f"part {ordinal} comes {len(files)} times: {', '.join(files[:5])}."
        book.check("part-doubled", len(files) == 1, message)


def _shown(numbers: Sequence[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:_MOST_SHOWN])
    return f"{shown} and more" if len(numbers) > _MOST_SHOWN else shown


def _check_columns(members: Sequence[FileFacts], book: RuleBook) -> None:
    known = [(member.name, member.column_paths) for member in members if member.column_paths is not None]
    if len(known) < len(members):
        book.not_checked("same-columns", "the columns of some files are not known")
    for name, paths in known[1:]:
        message = f"{name} has other columns than {known[0][0]}."
        book.check("same-columns", paths == known[0][1], message)


# --- What is beside the files ---


_WITHOUT_KMS = (
    "`verify` checks the table if --config has its KMS. Or check the table with `iceberg verify`, and "
    "accept this file with --allow-plaintext"
)


def is_table_metadata(location: FileLocation) -> bool:
    """Return whether a file is named as the metadata file of an Iceberg table."""
    return location.name.endswith((".metadata.json", ".metadata.json.gz"))


def _listed_files(folder: FileLocation, summary: FileLocation) -> Iterator[str]:
    """Yield the files that a summary file lists, as far as it can be read; nothing of it is authenticated."""
    envelope = _visible_of(summary)
    with suppress(ParquetFormatError):
        footer = None if envelope is None else envelope.unverified_footer()
        paths = {chunks[0].file_path for chunks in footer.chunks if chunks} if footer is not None else set()
        within = PurePosixPath(summary.path_within(folder)).parent
        yield from (str(within / path) for path in paths if path)


def _visible_of(location: FileLocation) -> FooterEnvelope | None:
    """Return what is visible of a file without a key; None where nothing is."""
    try:
        with open_source(location) as source:
            return read_envelope(source)
    except (OSError, KeytoolsError):
        return None


def _is_key_material(parquet_file: FileLocation) -> bool:
    """Return whether the file beside a Parquet file that is named as its key material is key material."""
    try:
        read_key_materials(parquet_file)
    except KeytoolsError:
        return False
    return True


def _refers_to_material_file(location: FileLocation) -> bool:
    """Return whether what is visible of a file that could not be verified refers to key material beside it."""
    envelope = _visible_of(location)
    try:
        return envelope is not None and isinstance(parse_key_metadata(envelope.key_metadata), KeyReference)
    except KeyMaterialError:
        return False


def _is_encrypted(location: FileLocation) -> bool:
    """Return whether a file has an encrypted footer, and so shows nothing."""
    envelope = _visible_of(location)
    return envelope is not None and envelope.mode is FooterMode.ENCRYPTED_FOOTER


_PLAINTEXT_PARQUET = "a plaintext Parquet file"
_STREAM_MAGIC = b"AGS1"
"""Streams of encrypted Iceberg tables; the length of a block follows."""
_MOST_BLOCK_BYTES = 64 * 1024**2
"""Four characters of text are a larger number. Iceberg writes 1 MiB."""
_DATA_MAGIC = {b"Obj\x01": "Avro", b"ORC": "ORC", b"ARROW1": "Arrow"}
_KIND_OF_ENDING = {
    **dict.fromkeys(("arrow", "arrows", "feather", "ipc"), "Arrow"),
    **dict.fromkeys(("csv", "psv", "tsv"), "CSV"),
    **dict.fromkeys(("geojson", "json", "jsonl", "ndjson"), "JSON"),
    "avro": "Avro",
    "orc": "ORC",
    "xml": "XML",
}
_COMPRESSIONS = ("br", "bz2", "deflate", "gz", "lz4", "snappy", "xz", "zip", "zst", "zstd")


def _plaintext_kind(location: FileLocation) -> str | None:
    """Return the format of a file that readers could take for plaintext data; None for other files.

    The content decides if it has magic, else the name.
    """
    with open_source(location) as source:
        if source.size_bytes == 0:
            return None
        start = bytes(source.read_at(0, min(source.size_bytes, 8)))
    if start.startswith(MAGIC):
        # It may be encrypted, with a plaintext footer.
        envelope = _visible_of(location)
        is_plaintext = envelope is None or envelope.mode is FooterMode.UNENCRYPTED
        return _PLAINTEXT_PARQUET if is_plaintext else None
    # Text may begin with these letters.
    is_stream = start.startswith(_STREAM_MAGIC) and 0 < int.from_bytes(start[4:8], "little") <= _MOST_BLOCK_BYTES
    if is_stream or (start.startswith(MAGIC_ENCRYPTED_FOOTER) and _is_encrypted(location)):
        return None
    for magic, kind in _DATA_MAGIC.items():
        if start.startswith(magic):
            return kind
    *_, ending = endings = location.name.lower().split(".")
    if ending in _COMPRESSIONS and len(endings) > 1:
        ending = endings[-2]
    return _KIND_OF_ENDING.get(ending) if len(endings) > 1 else None


# --- Lists of files ---

_FORMAT = "parquet-keytools file list"
_VERSION = 1
_PURPOSE = b"parquet-keytools file list 1"
"""Derives the key of the HMAC, so that no key of a Parquet file authenticates a list."""

_MAX_LIST_BYTES = 512 << 20
_FILES_AT_A_TIME = 100
_MOST_NAMED = 5


@dataclass(frozen=True)
class ListedFile(FileEnd):
    """What a list says about a file; a rotation does not change `file_unique`, in hexadecimal (spec 4.4.1)."""

    file_unique: str


def _check_list(
    files: Mapping[str, ListedFile], members: Sequence[FileFacts], unknown: Sequence[str], book: RuleBook
) -> None:
    """Compare the files of a folder with a list (rule `file-list`); `unknown` are files that were not verified."""
    found = {member.name: member for member in members}
    unverified = {*unknown, *(name for name, facts in found.items() if facts.mode is None)}
    entries = listed_files(members)
    for name, listed in files.items():
        if name in unverified:
            continue
        if name not in found:
            book.broken("file-list", f"{name} is in the list, and not in the folder.")
        elif name not in entries:
            book.broken("file-list", f"{name} is not encrypted, unlike the file in the list.")
        else:
            is_same = entries[name] == listed
            book.check("file-list", is_same, f"{name} has another size or footer than in the list.")
    for name in entries:
        book.check("file-list", name in files, f"{name} is not in the list.")
    for name in unverified:
        book.not_checked("file-list", f"{name} could not be verified")


def _listed(end: FileEnd, file_unique: bytes | None) -> ListedFile:
    return ListedFile(end.size_bytes, end.footer_sha256, (file_unique or b"").hex())


def listed_files(members: Sequence[FileFacts]) -> dict[str, ListedFile]:
    """Return the entries of encrypted files as they were verified: a file may have been replaced since."""
    return {
        member.name: _listed(member.end, member.file_unique)
        for member in members
        if member.is_encrypted and member.end is not None
    }


class ListKeeper:
    """Reads and writes lists with the keys of a configuration.

    Anyone who can unwrap keys with the master key of a list can forge lists under that key.
    """

    def __init__(self, keys: KeyService, table_name: str | None, key_name: str | None) -> None:
        """Choose the master key: the footer key of the table, unless another one is named."""
        self._keys = keys
        self._table_name, table = keys.configuration.select_table(table_name)
        self._key_name = key_name or table.footer_key
        keys.master_key_id(self._key_name)

    def follow(self, moves: Mapping[str, str] | None) -> None:
        """Take the master key that replaces the key of the list, as `Keytools.rotate` moves keys."""
        moves = self._keys.configuration.rotation.moves if moves is None else moves
        own = self._keys.master_key_id(self._key_name)
        for old, new in moves.items():
            if self._keys.master_key_id(old) == own:
                self._key_name = new

    def refuse_inside(self, target: FileLocation, folder: FileLocation) -> None:
        """Refuse a list inside the folder, where anyone who may change the data may put back an older list."""
        paths = [place.path.rstrip("/") for place in (target, folder)]
        if target.is_local and folder.is_local:
            paths = [os.path.realpath(path) for path in paths]
        if f"{paths[0]}/".startswith(f"{paths[1]}/"):
            raise ConfigurationError(
                f"the list {target} is in the folder of its files.",
                hint="Keep it where those who write the data cannot: an older list fits older files.",
            )

    def write(self, target: FileLocation, files: Mapping[str, ListedFile]) -> None:
        """Write a list with a new key; a file that exists is replaced in one step."""
        with audit.about(target):
            key, material = self._keys.new_wrapped_key(self._key_name)
        document = {
            "format": _FORMAT,
            "version": _VERSION,
            "table": self._table_name,
            "recorded_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "key_material": material.serialise(internal=True),
            "files": {name: asdict(listed) for name, listed in sorted(files.items())},
        }
        document["hmac_sha256"] = _hmac(key, document).hex()
        write_whole(target, json.dumps(document, indent=1).encode() + b"\n")

    def read(self, source: FileLocation) -> dict[str, ListedFile]:
        """Return the files of a list, by their paths within the folder, once the list is authenticated."""
        try:
            document = json.loads(read_whole(source, _MAX_LIST_BYTES))
            if document["format"] != _FORMAT or document["version"] != _VERSION:
                raise _invalid(source, "its format or version is unknown")
            claimed = bytes.fromhex(document.pop("hmac_sha256"))
            material = KeyMaterial.parse(document["key_material"])
        except (ParquetFormatError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise _invalid(source, "it is not a list that `verify --record` writes") from None
        # The list must not choose the master key: a reader of a column could forge a list under the column's key.
        if not self._keys.is_under(material, self._key_name):
            raise FileListError(
                f"{source} is under master key {printable(material.master_key_id)!r}, not {self._key_name!r}.",
                hint="Name the master key that the list was recorded with: --list-key.",
            )
        with audit.about(source):
            key = self._keys.unwrap_key(material)
        if not hmac.compare_digest(_hmac(key, document), claimed):
            raise _invalid(source, "its HMAC is wrong: the list was changed, or its key was")
        if document["table"] != self._table_name:
            raise _invalid(source, f"it is for table {document['table']!r}, not {self._table_name!r}")
        try:
            return {name: ListedFile(**entry) for name, entry in document["files"].items()}
        except (AttributeError, TypeError):
            raise _invalid(source, "its entries have unknown fields") from None

    def entries(self, folder: FileLocation) -> dict[str, ListedFile]:
        """Return the entries of all encrypted files of a folder, whose footers are authenticated."""
        found = data_set(folder, into_passed_over=True)
        files = [entry.location for entry in found if isinstance(entry, ParquetFile)]
        kms_keys = self._keys.kms_keys()
        entries: dict[str, ListedFile] = {}
        for start in range(0, len(files), _FILES_AT_A_TIME):
            opened = open_files(
                files[start : start + _FILES_AT_A_TIME],
                kms_keys,
                self._keys.data_keys,
                aad_prefix_of=lambda location, stored: self._keys.expected_aad_prefix(
                    location, self._table_name, None, stored
                ),
                # A rotation may have moved keys to a master key that the table does not name yet.
                table_check=None,
                allow_plaintext=True,
                wanted=lambda _: (),
            )
            for file in opened:
                if file.is_encrypted:
                    end = FileEnd.of(file.tail.offset, file.tail.data)
                    entries[file.location.path_within(folder)] = _listed(end, file.footer.envelope.aad_file_unique)
        return entries


def _invalid(source: FileLocation, why: str) -> FileListError:
    return FileListError(f"{source} is not valid: {why}.", hint="Use the list that was kept in a safe place.")


def _hmac(key: SecretBytes, document: Mapping[str, Any]) -> bytes:
    derived = hmac.digest(key.reveal(), _PURPOSE, "sha256")
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hmac.digest(derived, canonical.encode("ascii"), "sha256")


@contextmanager
def updated_list(
    target: FileLocation, folder: FileLocation, before: ListKeeper, after: ListKeeper, rekeyed: Collection[str]
) -> Iterator[None]:
    """Compare a folder with its list, let a `with` block change keys, and write the new list.

    Files that changed since the list was recorded are accepted if they have the same `aad_file_unique`, as they do
    after an interrupted rotation. The list is also written if the block raises. To `rekeyed`, the block adds the
    paths of files that it gave new data keys, and so a new `aad_file_unique`.
    """
    before.refuse_inside(target, folder)
    listed = before.read(target)
    _compare(target, listed, before.entries(folder), frozenset())

    def update() -> None:
        found = after.entries(folder)
        _compare(target, listed, found, {FileLocation.resolve(path).path_within(folder) for path in rekeyed})
        after.write(target, found)

    try:
        yield
    except BaseException:
        # The first error is the one to report.
        with suppress(KeytoolsError, OSError):
            update()
        raise
    update()


def _compare(
    target: FileLocation,
    listed: Mapping[str, ListedFile],
    found: Mapping[str, ListedFile],
    rekeyed: Collection[str],
) -> None:
    problems = [f"{name} is missing" for name in listed.keys() - found.keys()]
    problems += [f"{name} is not in the list" for name in found.keys() - listed.keys()]
    problems += [
        f"{name} is another file"
        for name in listed.keys() & found.keys()
        if listed[name].file_unique != found[name].file_unique and name not in rekeyed
    ]
    if problems:
        shown = "; ".join(map(escaped_path, sorted(problems)[:_MOST_NAMED]))
        more = f"; and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        raise FileListError(
            f"the files differ from the list {target}: {shown}{more}.",
            hint="Find out why: `verify --expect`. To accept the files that are there: `verify --record`.",
        )
