"""What is in folders of any file system, as it is: what cannot be looked at is an entry of its own.

Arrow and fsspec leave things out that they cannot look at, and say nothing. For local folders the operating system
is asked, so that links, pipes, and names that are not UTF-8 show as what they are.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self

from pyarrow import fs as pafs

from parquet_keytools.storage.locations import fsspec_of, with_slashes
from parquet_keytools.storage.printable import escaped_path

AT_A_TIME = 16
"""How many files are looked into, and folders of other machines listed, at a time: that is mostly waiting."""

_MOST_LEVELS = 500
"""Deeper folders are taken for links that lead in circles, where nothing else tells."""


@dataclass(slots=True)
class Listed:
    """A name in a folder.

    Attributes:
        path: With the folder's.
        is_folder: Whether it is one, maybe by a link.
        error: Why it could not be looked at, or that it is neither a file nor a folder.
        is_gone: Whether it was removed since the folder was listed.
    """

    name: str
    path: str
    is_folder: bool = False
    is_link: bool = False
    size_bytes: int = 0
    error: OSError | None = None
    is_gone: bool = False


@dataclass(slots=True)
class _Folder:
    """A folder that is to be listed.

    Attributes:
        is_passed_over: Whether it, or one that it lies in, has a name that is passed over.
        above: Device and inode of those that it lies in, by the way that led to it.
    """

    path: str
    is_passed_over: bool = False
    above: frozenset[tuple[int, int]] = frozenset()


@dataclass(slots=True)
class Listing(_Folder):
    """What is in a folder, by name; and why that is not all, if it is not."""

    listed: list[Listed] = field(default_factory=list)
    error: OSError | None = None
    is_gone: bool = False


RefusalOf = Callable[[str], OSError | None]
"""Returns why something that a link leads to is not looked into; None where it is."""


class FolderLister:
    """Lists folders, some at a time; used in a `with` block.

    Attributes:
        threads: Wait for other machines; none is started before it is needed.
    """

    def __init__(self, filesystem: pafs.FileSystem) -> None:
        self._filesystem = filesystem
        self.is_local = isinstance(filesystem, pafs.LocalFileSystem)
        self.threads = ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="parquet-keytools-walk")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.threads.shutdown(cancel_futures=True)

    def folders(
        self,
        root: str,
        is_passed_over: Callable[[str], bool],
        *,
        into_passed_over: bool,
        follow_links: bool = True,
        refusal_of: RefusalOf | None = None,
    ) -> Iterator[Listing]:
        """Yield the listings of a folder and of all below, each before those of its own folders.

        Args:
            root: The folder.
            is_passed_over: Whether a folder of this name is passed over.
            into_passed_over: Whether folders that are passed over are listed too.
            follow_links: Whether a link to a folder is a folder.
            refusal_of: Returns why a link to a folder is not followed; None follows it.
        """
        # Folders may lie deeper than Python calls functions.
        waiting: list[Iterator[Listing]] = [self._listings([_Folder(root)])]
        while waiting:
            listing = next(waiting[-1], None)
            if listing is None:
                waiting.pop()
                continue
            if not follow_links:
                for listed in listing.listed:
                    listed.is_folder &= not listed.is_link
            if refusal_of is not None:
                for listed in listing.listed:
                    if listed.is_link and listed.is_folder and (error := refusal_of(listed.path)) is not None:
                        listed.is_folder, listed.error = False, error
            below = [
                _Folder(listed.path, listing.is_passed_over or is_passed_over(listed.name), listing.above)
                for listed in listing.listed
                if listed.is_folder and (into_passed_over or not is_passed_over(listed.name))
            ]
            if below and len(waiting) > _MOST_LEVELS and not self.is_local:
                listing.error = OSError(errno.ELOOP, "its folders lie too deep", escaped_path(listing.path))
                below = []
            yield listing
            # It may be long, and what is below takes its time.
            del listing
            if below:
                waiting.append(self._listings(below))

    def _listings(self, folders: Sequence[_Folder]) -> Iterator[Listing]:
        """List folders, in their order; those of other machines some ahead."""
        if self.is_local or len(folders) == 1:
            yield from map(self._list, folders)
            return
        ahead: deque[Future[Listing]] = deque()
        for folder in folders:
            ahead.append(self.threads.submit(self._list, folder))
            if len(ahead) == AT_A_TIME:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()

    def _list(self, folder: _Folder) -> Listing:
        listing = Listing(folder.path, folder.is_passed_over, folder.above)
        (_list_local if self.is_local else self._list_other)(listing)
        listing.listed.sort(key=lambda listed: listed.name)
        return listing

    def _list_other(self, listing: Listing) -> None:
        """List a folder of another machine; fsspec itself leaves out what it may not list, and says nothing."""
        fsspec = fsspec_of(self._filesystem)
        base = listing.path.strip("/")
        try:
            if fsspec is not None:
                # What was listed some time ago is not what is there.
                fsspec.invalidate_cache(listing.path)
                infos = [_info_of(found) for found in fsspec.ls(listing.path, detail=True)]
            else:
                infos = self._filesystem.get_file_info(pafs.FileSelector(listing.path))
        except Exception as error:
            listing.error = store_error(error, listing.path)
            listing.is_gone = isinstance(error, FileNotFoundError)
            return
        for info in infos:
            path = info.path.rstrip("/")
            name = path.rpartition("/")[2]
            if path.strip("/") == base:
                # An object that stands for the folder itself.
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
            listing.error = OSError(
                errno.ELOOP, "a link to a folder that contains it: remove it", escaped_path(listing.path)
            )
            return
        listing.above |= {this}
        with os.scandir(listing.path) as entries:
            for entry in entries:
                listing.listed.append(_look_at(entry))
    except OSError as error:
        listing.error = named(error, listing.path)
        listing.is_gone = isinstance(error, FileNotFoundError) and not os.path.lexists(listing.path)


def _look_at(entry: os.DirEntry[str]) -> Listed:
    listed = Listed(entry.name, with_slashes(entry.path), is_link=entry.is_symlink())
    try:
        listed.is_folder = entry.is_dir()
        if not listed.is_folder:
            found = entry.stat()
            listed.size_bytes = found.st_size
            if not stat.S_ISREG(found.st_mode):
                kind = _KINDS.get(stat.S_IFMT(found.st_mode), "neither a file nor a folder")
                listed.error = _odd(f"{kind}: remove it, or begin its name with a dot", entry.path)
    except FileNotFoundError as error:
        listed.error = named(error, entry.path)
        listed.is_gone = not listed.is_link
        if not listed.is_gone:
            text = "a dangling link: mount its target, or remove the link"
            listed.error = OSError(errno.ENOENT, text, escaped_path(entry.path))
    except OSError as error:
        listed.error = named(error, entry.path)
    if not is_utf8(entry.name):
        listed.is_folder = False
        listed.error = OSError(errno.EILSEQ, "this name is not valid UTF-8: rename it", escaped_path(entry.path))
    return listed


_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def is_utf8(name: str) -> bool:
    """Tell whether a name of the operating system is UTF-8."""
    if name.isascii():
        return True
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _info_of(found: dict[str, Any]) -> pafs.FileInfo:
    kinds = {"file": pafs.FileType.File, "directory": pafs.FileType.Directory}
    kind = kinds.get(found["type"], pafs.FileType.Unknown)
    return pafs.FileInfo(str(found["name"]), kind, size=found.get("size"))


def named(error: OSError, path: str) -> OSError:
    """Return an error with the path as people can read it, and nothing that hangs on it."""
    reason = error.strerror or str(error) or type(error).__name__
    return OSError(error.errno or errno.EIO, reason, escaped_path(path))


def _odd(text: str, path: str) -> OSError:
    return OSError(errno.EINVAL, text, escaped_path(path))


def store_error(error: Exception, path: str) -> OSError:
    """Return what a store says. What its client's own errors say may hold signed addresses."""
    if isinstance(error, UnicodeDecodeError):
        return OSError(errno.EILSEQ, "a name in it is not valid UTF-8: rename it", escaped_path(path))
    if isinstance(error, OSError):
        number = error.errno or (errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EIO)
        lines = str(error.strerror or error).splitlines() or [type(error).__name__]
        return OSError(number, lines[0], escaped_path(path))
    return OSError(errno.EIO, f"the store failed ({type(error).__name__})", escaped_path(path))
