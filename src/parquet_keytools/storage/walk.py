"""THE walk: which files belong to a data set, what else lies in its folders, and what nobody can tell.

Every command, the facade, readers and Spark's pipelines ask here, so that all see the same files. One rule:

- Names that begin with `.` or `_` are passed over, of files and of folders, except those that begin with `_` and
  have a `=`: these are partitions (Spark's rule). What the caller names itself may be called anything.
- Summaries of footers and key material are known by their names.
- A file is a Parquet file if its name says so (`.parquet`, or that of a part), or if it has Parquet's magic at one
  of its ends. A damaged one fails then, and does not stay behind unnoticed.
- Links are followed. Folders may be called anything, also `x.parquet`.
- What cannot be looked into is an entry of its own: who says "all", "none" or "not used" must not pass over it.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import partial

from pyarrow import fs as pafs

from parquet_keytools.errors import IncompleteDataSetError, NoParquetFilesError, OutputError, ParquetFormatError
from parquet_keytools.format.file_layout import MAGIC, MAGIC_ENCRYPTED_FOOTER, MAGIC_LENGTH
from parquet_keytools.runtime import operating_system
from parquet_keytools.storage.listing import FolderLister, Listed, Listing, RefusalOf, is_utf8, named, store_error
from parquet_keytools.storage.locations import FileLocation, key_material_location
from parquet_keytools.storage.printable import escaped_path

_log = logging.getLogger(__name__)

SUMMARY_FILE_NAMES = frozenset({"_metadata", "_common_metadata"})
"""Files that hold the footers of all others."""

_KEY_MATERIAL_PREFIX = "_KEY_MATERIAL_FOR_"

_SAYS_PARQUET = re.compile(r"\.parquet|\Apart[-_.]?[0-9]", re.IGNORECASE)
"""Names of Parquet files, and of parts of a data set: they are not opened to look for magic."""

_MAGIC = frozenset({MAGIC, MAGIC_ENCRYPTED_FOOTER})


class LeftOutReason(StrEnum):
    """Why something is left out."""

    SUMMARY = "a summary of footers: it could show statistics in plaintext, and would not fit the new files"
    KEY_MATERIAL = "key material of a Parquet file that is not here"
    PASSED_OVER = "readers of data sets pass over names that begin with a dot or an underscore"
    NOT_PARQUET = "not a Parquet file"


@dataclass(frozen=True, slots=True)
class ParquetFile:
    """A Parquet file of a data set."""

    location: FileLocation
    size_bytes: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something that does not belong to the data set, and why; a folder, where those are not looked into."""

    location: FileLocation
    reason: LeftOutReason
    is_folder: bool = False

    @property
    def may_be_data(self) -> bool:
        """Whether Parquet files are passed over for a name: who looks for all files should hear of it."""
        is_named_so = self.is_folder or self.location.name.lower().endswith(".parquet")
        return self.reason is LeftOutReason.PASSED_OVER and is_named_so

    @property
    def path(self) -> str:
        """Its path, for people; with escapes for what is not UTF-8."""
        return escaped_path(str(self.location))


@dataclass(frozen=True, slots=True)
class Unseen:
    """Something that could not be checked: nobody can tell what belongs to the data set there.

    Attributes:
        location: Where it is. What is not UTF-8 in its path is kept as lone surrogates, which Arrow does not take.
        error: Why, with the path for people.
        is_gone: Whether it was there a moment ago, and is not any more.
    """

    location: FileLocation
    error: OSError
    is_gone: bool = False

    @property
    def path(self) -> str:
        """Its path, for people; with escapes for what is not UTF-8 or not printable."""
        return escaped_path(str(self.location))

    @property
    def reason(self) -> str:
        """Why it could not be looked into."""
        return self.error.strerror or type(self.error).__name__


Entry = ParquetFile | LeftOut | Unseen
"""What comes of a walk."""


def data_set(
    path: FileLocation, *, into_passed_over: bool = False, refusal_of: RefusalOf | None = None
) -> Iterator[Entry]:
    """Yield what a file is, or what lies in a folder: the files of a data set, by path.

    Args:
        path: A file or a folder, or what `FileLocation.resolve_all` made of a glob or a list.
        into_passed_over: Whether folders that are passed over are looked into too; all in them is left out.
        refusal_of: Returns why a link to a folder is not followed; None follows it.

    Raises:
        FileNotFoundError: There is nothing of that name.
        ParquetFormatError: It is neither a file nor a folder.
        NoParquetFilesError: The folder has no Parquet files, and all in it was looked into. Raised at the end.
    """
    if path.only:
        yield from _chosen(path, into_passed_over=into_passed_over, refusal_of=refusal_of)
        return
    info = file_or_folder(path)
    if info.type == pafs.FileType.File:
        yield ParquetFile(path, info.size or 0)
        return
    is_empty = True
    for entry in walk(path, into_passed_over=into_passed_over, refusal_of=refusal_of):
        is_empty &= isinstance(entry, LeftOut)
        yield entry
    if is_empty:
        raise NoParquetFilesError(path=str(path))


# --- for work in place, which does not leave what was named ---


@dataclass(frozen=True, slots=True)
class BehindLink:
    """A file or folder that is not changed under this name.

    Attributes:
        location: Where it is, by way of a link.
        target: Where it is without links.
        is_outside: Whether that is outside of what was named; else the file is changed under another name.
    """

    location: FileLocation
    target: str
    is_outside: bool

    @property
    def path(self) -> str:
        """Its path, for people."""
        return escaped_path(str(self.location))

    def error(self) -> OutputError:
        """Return why it is not changed, if it is outside."""
        return OutputError(
            f"{self.path} is not changed: it lies behind a link, outside of the folder that was named.",
            hint=f"To change it, name {escaped_path(self.target)}, or use --follow-links (follow_links=True).",
        )


def data_set_in_place(
    path: FileLocation, *, follow_links: bool, into_passed_over: bool = False
) -> Iterator[Entry | BehindLink]:
    """Yield the files of a data set that are to be changed in place, each file once; see `data_set`.

    Anyone who may write to one data set can put a link to another one there. So a link that leads out of what was
    named is not followed, unless the caller says so; what was named may itself be a link.

    Raises:
        FileNotFoundError: There is nothing of that name.
        ParquetFormatError: It is neither a file nor a folder.
        NoParquetFilesError: The folder has no Parquet files, and all in it was looked into. Raised at the end.
    """
    if not path.is_local:
        yield from data_set(path, into_passed_over=into_passed_over)
        return
    named = _NamedPlaces(path)
    refusal_of = None if follow_links else named.refusal_of
    for entry in data_set(path, into_passed_over=into_passed_over, refusal_of=refusal_of):
        target = os.path.realpath(entry.location.path)
        if isinstance(entry, Unseen) and entry.error is named.refusals.get(entry.location.path):
            yield BehindLink(entry.location, target, is_outside=True)
        elif not isinstance(entry, ParquetFile):
            yield entry
        elif not follow_links and not named.hold(target):
            yield BehindLink(entry.location, target, is_outside=True)
        elif named.is_another_name(entry.location.path, target):
            yield BehindLink(entry.location, target, is_outside=False)
        else:
            yield entry


class _NamedPlaces:
    """What a caller named: a file, a folder, or several, also by globs.

    Attributes:
        refusals: Path of each link to a folder that was not followed -> why.
    """

    def __init__(self, path: FileLocation) -> None:
        places = [FileLocation.resolve_all(path.below(name)) for name in path.only] or [path]
        self._places = [
            (
                place.path.rstrip("/"),
                os.path.realpath(place.path).rstrip("/"),
                place.only[0].split("/") if place.only else None,
            )
            for place in places
        ]
        self._seen: set[str] = set()
        self.refusals: dict[str, OSError] = {}

    def hold(self, target: str) -> bool:
        """Return whether something, by its path without links, was named or lies in what was named."""
        return any(_within(target, root) is not None for _, root, _ in self._places)

    def refusal_of(self, path: str) -> OSError | None:
        """Return why a link to a folder is not followed."""
        if self.hold(os.path.realpath(path)):
            return None
        error = OSError(errno.EXDEV, "a link that leads out of the folder that was named", escaped_path(path))
        return self.refusals.setdefault(path, error)

    def is_another_name(self, path: str, target: str) -> bool:
        """Return whether a file comes under another name, too, or came before."""
        is_direct = any(
            rest is not None and root + rest == target
            for rest, root in ((_within(path, place), root) for place, root, _ in self._places)
        )
        if is_direct and len(self._places) == 1:
            return target in self._seen
        if not is_direct and any(self._comes(target, root, pattern) for _, root, pattern in self._places):
            return True
        is_seen = target in self._seen
        self._seen.add(target)
        return is_seen

    def _comes(self, target: str, root: str, pattern: Sequence[str] | None) -> bool:
        """Return whether a walk comes to a file without links."""
        rest = _within(target, root)
        if rest is None or names_passed_over(rest):
            return False
        return pattern is None or _matches(rest.strip("/").split("/"), pattern)


def _within(path: str, folder: str) -> str | None:
    """Return the rest of a path within a folder, or None where it does not lie there."""
    if path == folder:
        return ""
    return path[len(folder) :] if path.startswith(f"{folder}/") else None


def file_or_folder(path: FileLocation) -> pafs.FileInfo:
    """Return what the file system says of a file or a folder.

    Raises:
        FileNotFoundError: There is nothing of that name.
        ParquetFormatError: It is neither.
    """
    info = path.info()
    if info.type == pafs.FileType.NotFound:
        raise FileNotFoundError(f"there is no file or folder {path}")
    if info.type not in (pafs.FileType.File, pafs.FileType.Directory):
        raise ParquetFormatError("this is neither a file nor a folder.", path=str(path))
    return info


def _chosen(folder: FileLocation, *, into_passed_over: bool, refusal_of: RefusalOf | None) -> Iterator[Entry]:
    """Yield what paths and globs in a folder name, each once."""
    seen: set[str] = set()
    for name in folder.only:
        place = FileLocation.resolve_all(folder.below(name))
        entries = (
            _matching(place, refusal_of)
            if place.only
            else data_set(place, into_passed_over=into_passed_over, refusal_of=refusal_of)
        )
        for entry in entries:
            if entry.location.path not in seen:
                seen.add(entry.location.path)
                yield entry


def _matching(glob: FileLocation, refusal_of: RefusalOf | None) -> Iterator[Entry]:
    """Yield what a glob names, and what could not be looked into and may hide some of it.

    Raises:
        FileNotFoundError: There is no folder that it begins with.
        NoParquetFilesError: It names no Parquet files.
    """
    pattern = glob.only[0].split("/")
    if not glob.is_folder():
        raise FileNotFoundError(f"nothing matches {glob}")
    skipped = len(glob.path.rstrip("/")) + 1 if glob.path else 0
    is_empty = True
    for entry in walk(FileLocation(glob.filesystem, glob.path), refusal_of=refusal_of):
        parts = entry.location.path[skipped:].split("/")
        if _matches(parts, pattern) or (isinstance(entry, Unseen) and _may_lead_to(parts, pattern)):
            is_empty &= isinstance(entry, LeftOut)
            yield entry
    if is_empty:
        raise NoParquetFilesError("no Parquet file has such a name.", path=str(glob))


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Tell whether a glob names a path, or a folder that it lies in."""
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_matches(parts[number:], pattern[1:]) for number in range(len(parts)))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _may_lead_to(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not parts or not pattern or pattern[0] == "**":
        return True
    return fnmatchcase(parts[0], pattern[0]) and _may_lead_to(parts[1:], pattern[1:])


def walk(
    folder: FileLocation, *, into_passed_over: bool = False, refusal_of: RefusalOf | None = None
) -> Iterator[Entry]:
    """Yield what lies under a folder: of each folder its files by name, then what is below; see `data_set`.

    One folder is in memory at a time, and some that are listed ahead on other machines. A folder is listed before
    the first of its files is yielded: one that is replaced meanwhile comes once. Key material belongs to its
    Parquet file, and comes only where that is not there.
    """
    with FolderLister(folder.filesystem) as lister:
        for listing in lister.folders(
            folder.path, is_passed_over, into_passed_over=into_passed_over, refusal_of=refusal_of
        ):
            yield from _classified(folder.filesystem, lister, listing, into_passed_over=into_passed_over)


def all_files(folder: FileLocation) -> Iterator[FileLocation]:
    """Yield all that lies under a folder and is no folder, whatever it is called, and folders that do not open.

    A link is a link here, and not followed.
    """
    with FolderLister(folder.filesystem) as lister:
        for listing in lister.folders(folder.path, is_passed_over, into_passed_over=True, follow_links=False):
            if listing.error is not None and not listing.is_gone:
                yield FileLocation(folder.filesystem, listing.path)
            for listed in listing.listed:
                if not listed.is_folder:
                    yield FileLocation(folder.filesystem, listed.path)


def names_in(folder: FileLocation) -> list[tuple[str, str, bool]]:
    """Return the name and path of what lies in a folder itself, and whether it is a file that can be looked at.

    Raises:
        OSError: The folder cannot be listed.
    """
    with FolderLister(folder.filesystem) as lister:
        listing = next(lister.folders(folder.path, lambda _: True, into_passed_over=False))
    if listing.error is not None:
        raise listing.error
    return [(listed.name, listed.path, not listed.is_folder and listed.error is None) for listed in listing.listed]


def infos_in(folder: FileLocation) -> list[pafs.FileInfo]:
    """Return what is in a folder, without what is below. Links are followed.

    Arrow cannot list a folder with a name that is not UTF-8. A file of such a name is left out if readers skip it,
    or its name is not that of a Parquet file.

    Raises:
        FileNotFoundError: There is no such folder.
        OSError: It cannot be listed.
        IncompleteDataSetError: It has another name that is not UTF-8.
    """
    try:
        infos: list[pafs.FileInfo] = folder.filesystem.get_file_info(pafs.FileSelector(folder.path))
        if all(info.path for info in infos):  # Arrow decodes a name when it is asked for.
            return infos
    except UnicodeDecodeError as error:
        if not folder.is_local:
            raise store_error(error, folder.path) from None
    with os.scandir(folder.path) as entries:
        found = {entry.name: entry.is_dir() for entry in entries}
    paths = []
    unseen = []
    for name, is_folder in found.items():
        if is_utf8(name):
            paths.append(f"{folder.path.rstrip('/')}/{name}")
        elif not is_passed_over(name) and (is_folder or _SAYS_PARQUET.search(name)):
            unseen.append((escaped_path(f"{folder.path}/{name}"), "this name is not valid UTF-8"))
        else:
            _log.warning("not listed, for its name is not UTF-8: %s/%s", folder, escaped_path(name))
    if unseen:
        raise IncompleteDataSetError(unseen, hint="Rename it.")
    infos = folder.filesystem.get_file_info(paths)
    return list(infos)


def raise_for_unseen(unseen: Sequence[Unseen], *, hint: str) -> None:
    """Raise an error that names what could not be looked into; things that were removed meanwhile are none.

    Raises:
        IncompleteDataSetError: There is such a thing.
    """
    entries = [(entry.path, entry.reason) for entry in unseen if not entry.is_gone]
    if entries:
        raise IncompleteDataSetError(entries, hint=hint)


def is_passed_over(name: str) -> bool:
    """Return whether readers of data sets pass over a file or folder of this name, as Spark has it."""
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def is_data_file(file: FileLocation) -> bool:
    """Return whether a file belongs to the data set of its folder: by its name, or else by its magic.

    Raises:
        OSError: It cannot be looked at.
    """
    if is_passed_over(file.name):
        return False
    if _SAYS_PARQUET.search(file.name):
        return True
    verdict = _has_magic(file.path) if file.is_local else _has_magic_elsewhere(file.filesystem, file.path)
    if isinstance(verdict, OSError):
        raise verdict
    return verdict


def names_passed_over(path: str) -> list[str]:
    """Return the names in a path within a data set that make readers pass over it."""
    return [name for name in path.split("/") if is_passed_over(name)]


def _reason_by_name(listing: Listing, listed: Listed, names: Collection[str]) -> LeftOutReason | None:
    name = listed.name
    if listing.is_passed_over:
        return None if listed.is_folder else LeftOutReason.PASSED_OVER
    if not listed.is_folder and name in SUMMARY_FILE_NAMES:
        return LeftOutReason.SUMMARY
    if not listed.is_folder and name.startswith(_KEY_MATERIAL_PREFIX):
        return None if _is_key_material_of(name, names) else LeftOutReason.KEY_MATERIAL
    return LeftOutReason.PASSED_OVER if is_passed_over(name) else None


def _is_key_material_of(name: str, names: Collection[str]) -> bool:
    parquet_file = name.removeprefix(_KEY_MATERIAL_PREFIX).removesuffix(".json")
    return name == f"{_KEY_MATERIAL_PREFIX}{parquet_file}.json" and parquet_file in names


def parquet_file_of(key_material: FileLocation) -> FileLocation | None:
    """Return the Parquet file beside which a file is its key material; None where it is no key material."""
    name = key_material.name.removeprefix(_KEY_MATERIAL_PREFIX).removesuffix(".json")
    parquet_file = key_material.sibling(name or "_")
    is_named_so = key_material_location(parquet_file).name == key_material.name
    return parquet_file if is_named_so and parquet_file.is_file() else None


def _asks_for_magic(listing: Listing, listed: Listed) -> bool:
    """Return whether the name of a file does not say whether it is Parquet."""
    if listed.is_folder or listed.error is not None or listing.is_passed_over or is_passed_over(listed.name):
        return False
    return not listed.name.startswith(_KEY_MATERIAL_PREFIX) and _SAYS_PARQUET.search(listed.name) is None


def _has_magic(path: str) -> bool | OSError:
    try:
        # A pipe that took its place must not make this wait.
        descriptor = operating_system.open_file(path, os.O_RDONLY, follow_link=True)
        try:
            start = operating_system.read_at(descriptor, MAGIC_LENGTH, 0)
            end = max(0, os.fstat(descriptor).st_size - MAGIC_LENGTH)
            return not _MAGIC.isdisjoint((start, operating_system.read_at(descriptor, MAGIC_LENGTH, end)))
        finally:
            os.close(descriptor)
    except OSError as error:
        return named(error, path)


def _classified(
    filesystem: pafs.FileSystem, lister: FolderLister, listing: Listing, *, into_passed_over: bool
) -> Iterator[Entry]:
    """Yield what is in a folder, except folders that are listed themselves."""
    if listing.error is not None:
        here = FileLocation(filesystem, listing.path)
        if listing.is_passed_over:
            yield LeftOut(here, LeftOutReason.PASSED_OVER)
        else:
            yield Unseen(here, listing.error, listing.is_gone)
    names = {listed.name for listed in listing.listed if not listed.is_folder}
    verdicts = _magic(
        filesystem, lister, [listed.path for listed in listing.listed if _asks_for_magic(listing, listed)]
    )
    for listed in listing.listed:
        location = FileLocation(filesystem, listed.path)
        reason = _reason_by_name(listing, listed, names)
        if listed.is_folder:
            if reason is not None and not into_passed_over:
                yield LeftOut(location, reason, is_folder=True)
        elif reason is not None:
            yield LeftOut(location, reason)
        elif _is_key_material_of(listed.name, names):
            continue
        elif listed.error is not None:
            yield Unseen(location, listed.error, listed.is_gone)
        else:
            verdict = next(verdicts) if _asks_for_magic(listing, listed) else True
            if isinstance(verdict, OSError):
                yield Unseen(location, verdict, isinstance(verdict, FileNotFoundError))
            elif verdict:
                yield ParquetFile(location, listed.size_bytes)
            else:
                yield LeftOut(location, LeftOutReason.NOT_PARQUET)


def _magic(filesystem: pafs.FileSystem, lister: FolderLister, paths: Sequence[str]) -> Iterator[bool | OSError]:
    look = _has_magic if lister.is_local else partial(_has_magic_elsewhere, filesystem)
    return lister.threads.map(look, paths) if len(paths) > 1 else map(look, paths)


def _has_magic_elsewhere(filesystem: pafs.FileSystem, path: str) -> bool | OSError:
    try:
        with filesystem.open_input_file(path) as file:
            end = max(0, file.size() - MAGIC_LENGTH)
            ends = (file.read_at(MAGIC_LENGTH, 0), file.read_at(MAGIC_LENGTH, end))
    except Exception as error:
        return store_error(error, path)
    return not _MAGIC.isdisjoint(ends)
