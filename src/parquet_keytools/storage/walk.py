"""The walk: which files belong to a data set, what else lies in its folders, and what could not be checked.

All commands, readers of data sets and Spark pipelines use it, so that they see the same files. The rules:

- Names that begin with `.` or `_`, of files and folders, are passed over, except partitions: names that begin with
  `_` and contain a `=` (Spark's rule). A file or folder that the caller names may have any name.
- Summaries of footers, and key material, are recognised by their names.
- A file is a Parquet file if its name says so (`.parquet` anywhere, or a part), or if it has Parquet's magic at
  one of its ends. A damaged file then fails, and is not left out unnoticed.
- Links are followed, except out of the folder where files are changed in place. Folders may have any name, such as
  `x.parquet`.
- What cannot be looked into is an entry of its own, because Arrow and fsspec leave it out silently. The operating
  system lists local folders, so that links, pipes, and names that are not UTF-8 are recognised.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import partial
from pathlib import PurePosixPath

from pyarrow import fs as pafs

from parquet_keytools.errors import IncompleteDataSetError, NoParquetFilesError, OutputError, ParquetFormatError
from parquet_keytools.format.file_layout import MAGIC, MAGIC_ENCRYPTED_FOOTER, MAGIC_LENGTH
from parquet_keytools.runtime.presentation import escaped_path
from parquet_keytools.storage.locations import FileLocation, fsspec_of, open_source, with_slashes

_log = logging.getLogger(__name__)

SUMMARY_FILE_NAMES = frozenset({"_metadata", "_common_metadata"})
"""Files that hold the footers of all others."""

KEY_MATERIAL_PREFIX = "_KEY_MATERIAL_FOR_"
"""Key material files have this prefix, the name of their Parquet file, and `.json`."""

_SAYS_PARQUET = re.compile(r"\.parquet|\Apart[-_.]?[0-9]", re.IGNORECASE)
"""Names of Parquet files: these are not opened to look for magic."""

_MAGIC = frozenset({MAGIC, MAGIC_ENCRYPTED_FOOTER})


class LeftOutReason(StrEnum):
    """Why an entry is left out."""

    SUMMARY = "a summary of footers: it could show statistics in plaintext, and would not fit the new files"
    KEY_MATERIAL = "key material of a Parquet file that is not here"
    KEY_MATERIAL_BESIDE = "named as key material of the file beside it"
    PASSED_OVER = "readers of data sets skip names that begin with a dot or an underscore"
    NOT_PARQUET = "not a Parquet file"


@dataclass(frozen=True, slots=True)
class _Named:
    location: FileLocation

    @property
    def path(self) -> str:
        """Its path, with escapes for what is not UTF-8 or not printable."""
        return escaped_path(str(self.location))


@dataclass(frozen=True, slots=True)
class ParquetFile(_Named):
    """A Parquet file of a data set."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class LeftOut(_Named):
    """A file, or a folder that was not looked into, that does not belong to the data set, and why."""

    reason: LeftOutReason
    is_folder: bool = False

    @property
    def may_be_data(self) -> bool:
        """Whether Parquet files may be passed over because of their name."""
        is_named_so = self.is_folder or self.location.name.lower().endswith(".parquet")
        return self.reason is LeftOutReason.PASSED_OVER and is_named_so


@dataclass(frozen=True, slots=True)
class Unseen(_Named):
    """An entry that could not be checked, and may hide files; its path may have lone surrogates (no UTF-8)."""

    error: OSError

    @property
    def is_gone(self) -> bool:
        """Whether it was removed meanwhile."""
        return isinstance(self.error, FileNotFoundError)

    @property
    def reason(self) -> str:
        """Why it could not be looked into."""
        return self.error.strerror or type(self.error).__name__


Entry = ParquetFile | LeftOut | Unseen
"""An entry of a walk."""


def data_set(
    path: FileLocation,
    *,
    into_passed_over: bool = False,
    with_key_material: bool = False,
    refusal_of: RefusalOf | None = None,
) -> Iterator[Entry]:
    """Yield the files of a data set, by path, and its other entries; without any, raise `NoParquetFilesError`."""
    # With `into_passed_over`, files of folders that are passed over are yielded as left out, and
    # `with_key_material` key material beside its file. `refusal_of` returns why a link is not followed.
    for entry in _entries(path, into_passed_over, refusal_of):
        is_beside = isinstance(entry, LeftOut) and entry.reason is LeftOutReason.KEY_MATERIAL_BESIDE
        if with_key_material or not is_beside:
            yield entry


def _entries(path: FileLocation, into_passed_over: bool, refusal_of: RefusalOf | None) -> Iterator[Entry]:
    if path.only:
        # Each entry that paths and globs in a folder name, once.
        seen: set[str] = set()
        for name in path.only:
            place = FileLocation.resolve_all(path.below(name))
            found = _matching(place, refusal_of) if place.only else _entries(place, into_passed_over, refusal_of)
            for entry in found:
                if entry.location.path not in seen:
                    seen.add(entry.location.path)
                    yield entry
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


# --- for work in place, which does not leave the named folder ---


@dataclass(frozen=True, slots=True)
class BehindLink(_Named):
    """A file or folder that is not changed under this name, but under its target's unless that `is_outside`."""

    target: str
    is_outside: bool

    def error(self) -> OutputError:
        """Return the error for a file outside of the named folder."""
        return OutputError(
            f"{self.path} is not changed: it lies behind a link, outside of the folder that was named.",
            hint=f"To change it, name {escaped_path(self.target)}, or use --follow-links (follow_links=True).",
        )


def data_set_in_place(
    path: FileLocation, *, follow_links: bool, into_passed_over: bool = False
) -> Iterator[Entry | BehindLink]:
    """Yield the files of a data set that are to be changed in place, each file once; see `data_set`."""
    # Anyone who may write to one data set can put a link to another one there. So a link that leads out of the
    # named folder is not followed without `follow_links`; the folder that is named may itself be a link.
    if not path.is_local:
        yield from data_set(path, into_passed_over=into_passed_over)
        return
    named = _NamedPlaces(path)
    refusal_of = None if follow_links else named.refusal_of
    entries = list(data_set(path, into_passed_over=into_passed_over, refusal_of=refusal_of))
    targets = [os.path.realpath(entry.location.path) for entry in entries]
    names: dict[str, str] = {}
    for entry, target in zip(entries, targets, strict=True):
        if isinstance(entry, ParquetFile) and (
            target not in names or named.is_direct(entry.location.path, target)
        ):
            names[target] = entry.location.path
    for entry, target in zip(entries, targets, strict=True):
        if isinstance(entry, Unseen) and entry.error is named.refusals.get(entry.location.path):
            yield BehindLink(entry.location, target, is_outside=True)
        elif not isinstance(entry, ParquetFile):
            yield entry
        elif not follow_links and not named.hold(target):
            yield BehindLink(entry.location, target, is_outside=True)
        elif entry.location.path != names[target]:
            yield BehindLink(entry.location, target, is_outside=False)
        else:
            yield entry


class _NamedPlaces:
    """The files and folders that a caller named, also by globs; `refusals` has links that were not followed."""

    def __init__(self, path: FileLocation) -> None:
        places = [FileLocation.resolve_all(path.below(name)) for name in path.only] or [path]
        self._places = [(place.path.rstrip("/"), os.path.realpath(place.path).rstrip("/")) for place in places]
        self.refusals: dict[str, OSError] = {}

    def hold(self, target: str) -> bool:
        """Return whether a path without links was named, or lies in a folder that was named."""
        return any(_within(target, root) is not None for _, root in self._places)

    def refusal_of(self, path: str) -> OSError | None:
        """Return why a link to a folder is not followed."""
        if self.hold(os.path.realpath(path)):
            return None
        error = OSError(errno.EXDEV, "a link that leads out of the folder that was named", escaped_path(path))
        return self.refusals.setdefault(path, error)

    def is_direct(self, path: str, target: str) -> bool:
        """Return whether a path leads to its target without links below the named places."""
        return any(
            rest is not None and root + rest == target
            for rest, root in ((_within(path, place), root) for place, root in self._places)
        )


def _within(path: str, folder: str) -> str | None:
    """Return the rest of a path within a folder; None if it is elsewhere."""
    if path == folder:
        return ""
    return path[len(folder) :] if path.startswith(f"{folder}/") else None


def file_or_folder(path: FileLocation) -> pafs.FileInfo:
    """Return the information about a file or a folder, or raise an error if it is neither."""
    info = path.info()
    if info.type == pafs.FileType.NotFound:
        raise FileNotFoundError(f"there is no file or folder {path}")
    if info.type not in (pafs.FileType.File, pafs.FileType.Directory):
        raise ParquetFormatError("this is neither a file nor a folder.", path=str(path))
    return info


def _matching(glob: FileLocation, refusal_of: RefusalOf | None) -> Iterator[Entry]:
    """Yield the entries that a glob names, and entries that could not be checked and may hide others."""
    pattern = glob.only[0].split("/")
    if not glob.is_folder():
        raise FileNotFoundError(f"nothing matches {glob}")
    skipped = len(glob.path.rstrip("/")) + 1 if glob.path else 0
    is_empty = True
    for entry in walk(FileLocation(glob.filesystem, glob.path), refusal_of=refusal_of):
        parts = entry.location.path[skipped:].split("/")
        if isinstance(entry, LeftOut) and entry.reason is LeftOutReason.KEY_MATERIAL_BESIDE:
            continue
        if _matches(parts, pattern) or (isinstance(entry, Unseen) and _may_lead_to(parts, pattern)):
            is_empty &= isinstance(entry, LeftOut)
            yield entry
    if is_empty:
        raise NoParquetFilesError("no Parquet file has such a name.", path=str(glob))


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether a glob names a path, or a folder above it."""
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
    """Yield the entries below a folder: the files of each folder by name, then its folders; see `data_set`."""
    # A folder is listed before its first file is yielded, so that a file that is replaced meanwhile comes once.
    with _threads() as threads:
        for listing in _listings(folder, threads, into_passed_over=into_passed_over, refusal_of=refusal_of):
            yield from _classified(folder.filesystem, threads, listing, into_passed_over=into_passed_over)


def all_files(folder: FileLocation) -> Iterator[FileLocation]:
    """Yield everything below a folder except folders that can be listed. Links are yielded, and not followed."""
    with _threads() as threads:
        for listing in _listings(folder, threads, into_passed_over=True, refusal_of=lambda _: OSError()):
            if listing.error is not None and not isinstance(listing.error, FileNotFoundError):
                yield FileLocation(folder.filesystem, listing.path)
            for listed in listing.listed:
                if not listed.is_folder:
                    yield FileLocation(folder.filesystem, listed.path)


def names_in(folder: FileLocation) -> list[str]:
    """Return the names in a folder, including broken links; raise `OSError` if it cannot be listed."""
    listing = _fill(folder.filesystem, Listing(folder.path))
    if listing.error is not None:
        raise listing.error
    return [listed.name for listed in listing.listed]


def infos_in(folder: FileLocation) -> list[pafs.FileInfo]:
    """Return the information about each entry of a folder; links are followed, and names must be UTF-8."""
    try:
        infos = folder.filesystem.get_file_info(pafs.FileSelector(folder.path))
        return [info for info in infos if info.path]  # Arrow decodes a name when it is asked for.
    except UnicodeDecodeError:
        entries = [(escaped_path(f"{folder.path}/*"), "a name is not valid UTF-8")]
        raise IncompleteDataSetError(entries, hint="Rename it.") from None


def raise_for_unseen(unseen: Sequence[Unseen], *, hint: str) -> None:
    """Raise `IncompleteDataSetError` for entries that could not be checked, unless they were removed meanwhile."""
    entries = [(entry.path, entry.reason) for entry in unseen if not entry.is_gone]
    if entries:
        raise IncompleteDataSetError(entries, hint=hint)


def leads_back(path: str) -> bool:
    """Return whether a local path is a link to a folder above it, so that a walk would never end."""
    if not os.path.islink(path):  # noqa: PTH114 - for each folder of many
        return False
    return os.path.realpath(path) in {os.path.realpath(parent) for parent in PurePosixPath(path).parents}


def is_passed_over(name: str) -> bool:
    """Return whether readers of data sets pass over this name, by Spark's rule."""
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def is_data_file(file: FileLocation) -> bool:
    """Return whether a file belongs to the data set of its folder, by its name, or else by its magic."""
    by_name = _by_name(file.name, ())
    if by_name is not None:
        return by_name is True
    verdict = has_magic(file)
    if isinstance(verdict, OSError):
        raise verdict
    return verdict


def names_passed_over(path: str) -> list[str]:
    """Return the names in a path that make readers of the data set pass over it."""
    return [name for name in path.split("/") if is_passed_over(name)]


def _by_name(name: str, names: Collection[str]) -> LeftOutReason | bool | None:
    """Return why a file is left out, True if it is Parquet, and None if only its magic shows whether it is."""
    if name in SUMMARY_FILE_NAMES:
        return LeftOutReason.SUMMARY
    if name.startswith(KEY_MATERIAL_PREFIX):
        parquet_file = name.removeprefix(KEY_MATERIAL_PREFIX).removesuffix(".json")
        is_beside = name.endswith(".json") and parquet_file in names
        return LeftOutReason.KEY_MATERIAL_BESIDE if is_beside else LeftOutReason.KEY_MATERIAL
    if is_passed_over(name):
        return LeftOutReason.PASSED_OVER
    return True if _SAYS_PARQUET.search(name) else None


def has_magic(file: FileLocation) -> bool | OSError:
    """Return whether a file begins or ends as Parquet does, or why it cannot be read."""
    try:
        with open_source(file) as source:
            length = min(MAGIC_LENGTH, source.size_bytes)
            ends = (source.read_at(0, length), source.read_at(source.size_bytes - length, length))
            return not _MAGIC.isdisjoint(map(bytes, ends))
    except Exception as error:
        return store_error(error, file.path)


def _classified(
    filesystem: pafs.FileSystem, threads: ThreadPoolExecutor, listing: Listing, *, into_passed_over: bool
) -> Iterator[Entry]:
    """Yield the entries of a folder, except folders that are listed themselves."""
    if listing.error is not None:
        here = FileLocation(filesystem, listing.path)
        if listing.is_passed_over:
            yield LeftOut(here, LeftOutReason.PASSED_OVER)
        else:
            yield Unseen(here, listing.error)
    files = [listed for listed in listing.listed if not listed.is_folder]
    names = {listed.name for listed in files}
    passed_over = LeftOutReason.PASSED_OVER
    by_name = {name: passed_over if listing.is_passed_over else _by_name(name, names) for name in names}
    asked = [
        FileLocation(filesystem, listed.path)
        for listed in files
        if listed.error is None and by_name[listed.name] is None
    ]
    verdicts = threads.map(has_magic, asked) if len(asked) > 1 else map(has_magic, asked)
    for listed in listing.listed:
        location = FileLocation(filesystem, listed.path)
        if listed.is_folder:
            if is_passed_over(listed.name) and not (listing.is_passed_over or into_passed_over):
                yield LeftOut(location, passed_over, is_folder=True)
            continue
        verdict = by_name[listed.name]
        if isinstance(verdict, LeftOutReason):
            yield LeftOut(location, verdict)
        elif listed.error is not None:
            yield Unseen(location, listed.error)
        else:
            found = next(verdicts) if verdict is None else verdict
            if isinstance(found, OSError):
                yield Unseen(location, found)
            elif found:
                yield ParquetFile(location, listed.size_bytes)
            else:
                yield LeftOut(location, LeftOutReason.NOT_PARQUET)


# --- the content of folders, as it is ---

AT_A_TIME = 16
"""How many files are read, and remote folders listed, at a time: threads mostly wait."""

_MOST_LEVELS = 500
"""On remote file systems, deeper folders are taken for circular links."""


@dataclass(slots=True)
class Listed:
    """A name in a folder; a link to a folder `is_folder`, too."""

    name: str
    path: str
    is_folder: bool = False
    is_link: bool = False
    size_bytes: int = 0
    error: OSError | None = None


@dataclass(slots=True)
class Listing:
    """The content of a folder, by name; with an `error`, it is incomplete.

    `is_passed_over` is inherited from the folders above; `above` has device and inode of each of them.
    """

    path: str
    is_passed_over: bool = False
    above: frozenset[tuple[int, int]] = frozenset()
    listed: list[Listed] = field(default_factory=list)
    error: OSError | None = None


RefusalOf = Callable[[str], OSError | None]
"""Returns why a link to a folder is not followed; None if it is."""


@contextlib.contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """Yield threads for remote folders and files, which start when they are needed."""
    threads = ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="parquet-keytools-walk")
    try:
        yield threads
    finally:
        threads.shutdown(cancel_futures=True)


def _listings(
    folder: FileLocation,
    threads: ThreadPoolExecutor,
    *,
    into_passed_over: bool,
    refusal_of: RefusalOf | None = None,
) -> Iterator[Listing]:
    """Yield the listings of a folder and of all folders below it, outer folders first."""
    filesystem, is_local = folder.filesystem, folder.is_local
    # Not recursive, because folders may be deeper than Python's stack.
    waiting: list[Iterator[Listing]] = [iter([_fill(filesystem, Listing(folder.path))])]
    while waiting:
        listing = next(waiting[-1], None)
        if listing is None:
            waiting.pop()
            continue
        if refusal_of is not None:
            for listed in listing.listed:
                if listed.is_link and listed.is_folder and (error := refusal_of(listed.path)) is not None:
                    listed.is_folder, listed.error = False, error
        below = [
            Listing(listed.path, listing.is_passed_over or is_passed_over(listed.name), listing.above)
            for listed in listing.listed
            if listed.is_folder and (into_passed_over or not is_passed_over(listed.name))
        ]
        if below and len(waiting) > _MOST_LEVELS and not is_local:
            listing.error = _odd("its folders lie too deep", listing.path, errno.ELOOP)
            below = []
        yield listing
        # It may be long, and the folders below take their time.
        del listing
        if below:
            fill = partial(_fill, filesystem)
            waiting.append(map(fill, below) if is_local or len(below) == 1 else _some_ahead(threads, fill, below))


def _some_ahead(
    threads: ThreadPoolExecutor, fill: Callable[[Listing], Listing], folders: Sequence[Listing]
) -> Iterator[Listing]:
    """List remote folders in their order, some ahead."""
    ahead: deque[Future[Listing]] = deque()
    for folder in folders:
        ahead.append(threads.submit(fill, folder))
        if len(ahead) == AT_A_TIME:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()


def _fill(filesystem: pafs.FileSystem, listing: Listing) -> Listing:
    """Fill in the content of a folder."""
    if isinstance(filesystem, pafs.LocalFileSystem):
        _list_local(listing)
    else:
        _list_other(filesystem, listing)
    listing.listed.sort(key=lambda listed: listed.name)
    return listing


def _list_other(filesystem: pafs.FileSystem, listing: Listing) -> None:
    """List a remote folder; Arrow's wrapper of fsspec silently leaves out what it may not list."""
    fsspec = fsspec_of(filesystem)
    base = listing.path.strip("/")
    try:
        if fsspec is not None:
            # The cache may be outdated.
            fsspec.invalidate_cache(listing.path)
            found = fsspec.ls(listing.path, detail=True)
            infos = [
                pafs.FileInfo(
                    str(one["name"]), _TYPES.get(one["type"], pafs.FileType.Unknown), size=one.get("size")
                )
                for one in found
            ]
        else:
            infos = filesystem.get_file_info(pafs.FileSelector(listing.path))
    except Exception as error:
        listing.error = store_error(error, listing.path)
        if isinstance(listing.error, FileNotFoundError) and not isinstance(error, FileNotFoundError):
            # A library's error with this number need not say that the folder is gone.
            listing.error = _odd(listing.error.strerror or type(error).__name__, listing.path, errno.EIO)
        return
    for info in infos:
        path = info.path.rstrip("/")
        name = path.rpartition("/")[2]
        if path.strip("/") == base:
            # An object that marks the folder itself.
            continue
        listed = Listed(name, path, info.type == pafs.FileType.Directory, size_bytes=info.size or 0)
        if path.strip("/") != f"{base}/{name}".strip("/") or not name:
            # Such as `a//b`: Arrow cannot name it.
            listed.is_folder, listed.error = False, _odd("the store lists it in another folder", path)
        elif info.type not in (pafs.FileType.Directory, pafs.FileType.File):
            listed.error = _odd("neither a file nor a folder, as the store has it", path)
        listing.listed.append(listed)


def _list_local(listing: Listing) -> None:
    try:
        found = os.stat(listing.path)  # noqa: PTH116 - for each folder of many
        this = (found.st_dev, found.st_ino)
        if this in listing.above:
            listing.error = _odd("a link to a folder that contains it: remove it", listing.path, errno.ELOOP)
            return
        listing.above |= {this}
        with os.scandir(listing.path) as entries:
            for entry in entries:
                listing.listed.append(_look_at(entry))
    except OSError as error:
        listing.error = store_error(error, listing.path)
        if isinstance(error, FileNotFoundError) and os.path.lexists(listing.path):
            listing.error = _odd(_DANGLING, listing.path)


def _look_at(entry: os.DirEntry[str]) -> Listed:
    listed = Listed(entry.name, with_slashes(entry.path), is_link=entry.is_symlink())
    try:
        listed.is_folder = entry.is_dir()
        if not listed.is_folder:
            found = entry.stat()
            listed.size_bytes = found.st_size
            if not stat.S_ISREG(found.st_mode):
                why = "neither a file nor a folder: remove it, or begin its name with a dot"
                listed.error = _odd(why, entry.path)
    except FileNotFoundError as error:
        # Only what was removed meanwhile stays a `FileNotFoundError`.
        listed.error = _odd(_DANGLING, entry.path) if listed.is_link else store_error(error, entry.path)
    except OSError as error:
        listed.error = store_error(error, entry.path)
    if not is_utf8(entry.name):
        listed.is_folder = False
        listed.error = _odd("this name is not valid UTF-8: rename it", entry.path, errno.EILSEQ)
    return listed


_DANGLING = "a dangling link: mount its target, or remove the link"


def is_utf8(name: str) -> bool:
    """Return whether a name of the operating system is UTF-8."""
    return name.isascii() or name.encode(errors="ignore").decode() == name


_TYPES = {"file": pafs.FileType.File, "directory": pafs.FileType.Directory}


def _odd(text: str, path: str, number: int = errno.EINVAL) -> OSError:
    return OSError(number, text, escaped_path(path))


def store_error(error: Exception, path: str) -> OSError:
    """Return the error of a store, without the texts of client libraries, which may quote signed addresses."""
    if isinstance(error, UnicodeDecodeError):
        return OSError(errno.EILSEQ, "a name in it is not valid UTF-8: rename it", escaped_path(path))
    if isinstance(error, OSError):
        number = error.errno or (errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EIO)
        lines = str(error.strerror or error).splitlines() or [type(error).__name__]
        return OSError(number, lines[0], escaped_path(path))
    return OSError(errno.EIO, f"the store failed ({type(error).__name__})", escaped_path(path))
