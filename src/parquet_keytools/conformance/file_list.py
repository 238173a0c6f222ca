"""Lists of the files of a data set, authenticated by an HMAC whose key a master key wraps.

A data set of plain files does not say which files belong to it. With a list, `verify` also finds files that were
removed, added, exchanged or put back in an older version.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from parquet_keytools import audit
from parquet_keytools.conformance.data_set import Member
from parquet_keytools.conformance.file_verifier import FileEnd
from parquet_keytools.conformance.report import RuleBook
from parquet_keytools.errors import ConfigurationError, FileListError, KeytoolsError, ParquetFormatError
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.files.opened_file import OpenedFile, open_files
from parquet_keytools.keys.key_material import KeyMaterial
from parquet_keytools.runtime.presentation import escaped_path, printable
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation, read_whole
from parquet_keytools.storage.outputs import write_whole
from parquet_keytools.storage.walk import ParquetFile, data_set

_FORMAT = "parquet-keytools file list"
_VERSION = 1
_PURPOSE = b"parquet-keytools file list 1"
"""Derives the key of the HMAC, so that no key of a Parquet file authenticates a list."""

_MAX_LIST_BYTES = 512 << 20
_FILES_AT_A_TIME = 100
_MOST_NAMED = 5


@dataclass(frozen=True)
class ListedFile:
    """What a list says about a file.

    Attributes:
        size_bytes: Length of the file.
        footer_sha256: See `FileEnd`.
        file_unique: Its `aad_file_unique`, in hexadecimal; a rotation does not change it (spec 4.4.1).
    """

    size_bytes: int
    footer_sha256: str
    file_unique: str

    @classmethod
    def of(cls, end: FileEnd, file_unique: bytes | None) -> ListedFile:
        """Return the entry of an encrypted file."""
        return cls(end.size_bytes, end.footer_sha256, (file_unique or b"").hex())


def check_list(
    files: Mapping[str, ListedFile], members: Sequence[Member], unknown: Sequence[str], book: RuleBook
) -> None:
    """Compare the files of a folder with a list (rule `file-list`).

    Args:
        files: Path within the folder -> the file in the list.
        members: The files that were verified.
        unknown: Paths within the folder of files that were not.
        book: Where breaches are noted.
    """
    found = {member.name: member.facts for member in members}
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


def listed_files(members: Sequence[Member]) -> dict[str, ListedFile]:
    """Return the entries of encrypted files as they were verified: a file may have been replaced since."""
    return {
        member.name: ListedFile.of(member.facts.end, member.facts.file_unique)
        for member in members
        if member.facts.is_encrypted and member.facts.end is not None
    }


class ListKeeper:
    """Reads and writes lists with the keys of a configuration.

    Anyone who can unwrap keys with the master key of a list can forge lists under that key.
    """

    def __init__(self, keys: KeyService, table_name: str | None, key_name: str | None) -> None:
        """Choose the master key.

        Args:
            keys: Wraps and unwraps the key of the HMAC.
            table_name: The table of the files; None if there is only one.
            key_name: The master key; None for the footer key of the table.

        Raises:
            ConfigurationError: The table or the key does not exist, or the key is a data key.
        """
        self._keys = keys
        self._table_name, table = keys.configuration.select_table(table_name)
        self._key_name = key_name or table.footer_key
        keys.master_key_id(self._key_name)

    def follow(self, moves: Mapping[str, str] | None) -> None:
        """Take the master key that replaces the key of the list, as a rotation moves keys.

        Args:
            moves: Old master key -> new master key; None takes the moves of the configuration.
        """
        moves = self._keys.configuration.rotation.moves if moves is None else moves
        own = self._keys.master_key_id(self._key_name)
        for old, new in moves.items():
            if self._keys.master_key_id(old) == own:
                self._key_name = new

    def refuse_inside(self, target: FileLocation, folder: FileLocation) -> None:
        """Refuse a list inside the folder, where anyone who may change the data may put back an older list.

        Raises:
            ConfigurationError: It would be there.
        """
        paths = [place.path.rstrip("/") for place in (target, folder)]
        if target.is_local and folder.is_local:
            paths = [os.path.realpath(path) for path in paths]
        if f"{paths[0]}/".startswith(f"{paths[1]}/"):
            raise ConfigurationError(
                f"the list {target} is in the folder of its files.",
                hint="Keep it where those who write the data cannot: an older list fits older files.",
            )

    def write(self, target: FileLocation, files: Mapping[str, ListedFile]) -> None:
        """Write a list with a new key; a file that exists is replaced in one step.

        Raises:
            KmsError: The key cannot be wrapped.
            OutputError: The list cannot be written.
        """
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
        """Return the files of a list, by their paths within the folder, once the list is authenticated.

        Raises:
            FileListError: The list is not valid, not authentic, for another table or under another master key.
            KmsError: The key cannot be unwrapped.
            OSError: The list cannot be read.
        """
        document, material, claimed = _parsed(source)
        with audit.about(source):
            key = self._unwrapped(source, material)
        if not hmac.compare_digest(_hmac(key, document), claimed):
            raise _invalid(source, "its HMAC is wrong: the list was changed, or its key was")
        if document["table"] != self._table_name:
            raise _invalid(source, f"it is for table {document['table']!r}, not {self._table_name!r}")
        try:
            return {name: ListedFile(**entry) for name, entry in document["files"].items()}
        except (AttributeError, TypeError):
            raise _invalid(source, "its entries have unknown fields") from None

    def entries(self, folder: FileLocation) -> dict[str, ListedFile]:
        """Return the entries of all encrypted files of a folder, whose footers are authenticated.

        Raises:
            KeytoolsError: A footer cannot be authenticated.
        """
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
            entries |= {file.location.path_within(folder): _entry(file) for file in opened if file.is_encrypted}
        return entries

    def _unwrapped(self, source: FileLocation, material: KeyMaterial) -> SecretBytes:
        # The list must not choose the master key: a reader of a column could forge a list under the column's key.
        if not self._keys.is_under(material, self._key_name):
            raise FileListError(
                f"{source} is under master key {printable(material.master_key_id)!r}, not {self._key_name!r}.",
                hint="Name the master key that the list was recorded with: --list-key.",
            )
        return self._keys.unwrap_key(material)


def _parsed(source: FileLocation) -> tuple[dict[str, Any], KeyMaterial, bytes]:
    """Return the document without its HMAC, its key material, and the HMAC. Nothing is authenticated yet."""
    try:
        document = json.loads(read_whole(source, _MAX_LIST_BYTES))
        if document["format"] != _FORMAT or document["version"] != _VERSION:
            raise _invalid(source, "its format or version is unknown")
        claimed = bytes.fromhex(document.pop("hmac_sha256"))
        return document, KeyMaterial.parse(document["key_material"]), claimed
    except (ParquetFormatError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _invalid(source, "it is not a list that `verify --record` writes") from None


def _invalid(source: FileLocation, why: str) -> FileListError:
    return FileListError(f"{source} is not valid: {why}.", hint="Use the list that was kept in a safe place.")


def _hmac(key: SecretBytes, document: Mapping[str, Any]) -> bytes:
    derived = hmac.digest(key.reveal(), _PURPOSE, "sha256")
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hmac.digest(derived, canonical.encode("ascii"), "sha256")


# --- lists that follow a change of keys ---


@contextmanager
def updated_list(
    target: FileLocation, folder: FileLocation, before: ListKeeper, after: ListKeeper, rekeyed: Collection[str]
) -> Iterator[None]:
    """Compare a folder with its list, let a `with` block change keys, and write the new list.

    Files that changed since the list was recorded are accepted if they have the same `aad_file_unique`, as they do
    after an interrupted rotation. The list is also written if the block raises.

    Args:
        target: The list.
        folder: Its files.
        before: Has the keys of the list and the files.
        after: Has their keys afterwards.
        rekeyed: The block adds the paths of files that it gave new data keys, and so a new `aad_file_unique`.

    Raises:
        ConfigurationError: The list is in the folder.
        FileListError: The list is not authentic, or the files differ from it.
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


def _entry(file: OpenedFile) -> ListedFile:
    file_unique = file.footer.envelope.aad_file_unique
    return ListedFile.of(FileEnd.of(file.tail.offset, file.tail.data), file_unique)


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
