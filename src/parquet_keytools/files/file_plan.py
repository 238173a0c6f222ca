"""Which files a command reads, where it writes them, and whether an earlier run has written them already."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from pyarrow import fs as pafs

from parquet_keytools.encryption.footer import Footer, read_footer
from parquet_keytools.errors import (
    ColumnAccessDeniedError,
    KeytoolsError,
    KmsError,
    OutputError,
)
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.format.structs import ColumnMetaData
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation, real_location
from parquet_keytools.storage.sources import open_source
from parquet_keytools.storage.walk import LeftOut, ParquetFile, Unseen, all_files, data_set, file_or_folder


@dataclass(frozen=True)
class PlannedFile:
    """A Parquet file, and where its counterpart goes.

    Attributes:
        source: What is read.
        target: What is written.
        size_bytes: Length of the source.
        path_in_folder: Path of both from the folder on that is mirrored; the name of the source where none is.
    """

    source: FileLocation
    target: FileLocation
    size_bytes: int
    path_in_folder: str


@dataclass(frozen=True)
class FilePlan:
    """What is to be done.

    Attributes:
        source_is_folder: Whether a folder is mirrored.
        files: By path; empty only where something could not be looked into.
        left_out: What else is in the folder, by path.
        unseen: What could not be looked into, by path: files may be missing in the target.
    """

    source_is_folder: bool
    files: tuple[PlannedFile, ...]
    left_out: tuple[LeftOut, ...] = ()
    unseen: tuple[Unseen, ...] = ()

    @property
    def paths_in_folder(self) -> list[str]:
        """Paths of the files from the folder on that is mirrored; names alone where none is."""
        return [file.path_in_folder for file in self.files]

    @property
    def size_bytes(self) -> int:
        """Length of all sources together."""
        return sum(file.size_bytes for file in self.files)


def plan_files(source: FileLocation, target: FileLocation, *, overwrite: bool = False) -> FilePlan:
    """Plan the work on a file or a folder; nothing is written.

    Args:
        source: A file or a folder.
        target: Where the file goes, or the folder with the same folders in it.
        overwrite: Whether the target may exist, and a target folder may hold files. What has no counterpart in
            the source stays there.

    Raises:
        FileNotFoundError: There is no source.
        OutputError: The target exists, or is the source or a folder in it, or a link in it leads out of it.
        NoParquetFilesError: The source folder has no Parquet files.
    """
    is_folder = not file_or_folder(source).is_file
    return (_plan_folder if is_folder else _plan_file)(source, target, overwrite)


def _plan_file(source: FileLocation, target: FileLocation, overwrite: bool) -> FilePlan:
    check_target_file(source, target, overwrite=overwrite)
    return FilePlan(False, (PlannedFile(source, target, source.size_bytes(), source.name),))


def check_target_file(source: FileLocation, target: FileLocation, *, overwrite: bool) -> None:
    """Refuse a file that another one must not be converted to.

    Raises:
        OutputError: It is the source, or a folder or no regular file, or is there and must not be replaced.
    """
    if source.is_same_file(target):
        raise OutputError(f"{target} is the source itself.", hint="Choose another file for the output.")
    found = target.info()
    if found.type == pafs.FileType.Directory:
        raise OutputError(f"{target} is a folder, and the source is a file.", hint="Name a file in it.")
    if found.type == pafs.FileType.Unknown:
        raise OutputError(f"{target} is not a regular file.")
    if found.type != pafs.FileType.NotFound and not overwrite:
        raise OutputError(f"{target} exists already.", hint="Use --overwrite to replace it.")


def _plan_folder(source: FileLocation, target: FileLocation, overwrite: bool) -> FilePlan:
    check_target_folder(source, target, overwrite=overwrite)
    found = sorted(data_set(source, into_passed_over=True), key=lambda entry: entry.location.path)
    parquet_files = [entry for entry in found if isinstance(entry, ParquetFile)]
    paths = [file.location.path_within(source) for file in parquet_files]
    files = tuple(
        PlannedFile(file.location, target.child(path), file.size_bytes, path)
        for file, path in zip(parquet_files, paths, strict=True)
    )
    if target.is_local:
        root = PurePosixPath(_real_path(target))
        for file in files:
            if not PurePosixPath(_real_path(file.target)).is_relative_to(root):
                raise OutputError(
                    f"{file.target} is not written: a link leads out of the folder {target}.",
                    hint="Remove the link, or name another folder.",
                )
    if target.filesystem == source.filesystem:
        sources = {_real_path(file.source) for file in files}
        for file in files:
            if _real_path(file.target) in sources:
                raise OutputError(
                    f"{file.target} would be overwritten, and is itself a source.", hint="Name another folder."
                )
    return FilePlan(
        True,
        files,
        tuple(entry for entry in found if isinstance(entry, LeftOut)),
        tuple(entry for entry in found if isinstance(entry, Unseen)),
    )


def check_target_folder(source: FileLocation, target: FileLocation, *, overwrite: bool) -> None:
    """Refuse a folder that a folder must not be mirrored to.

    Raises:
        OutputError: It is the source or in it, or no folder, or holds files and may not.
    """
    # What is named one by one may lie beside it.
    if target.filesystem == source.filesystem and not source.only:
        ours, theirs = PurePosixPath(_real_path(target)), PurePosixPath(_real_path(source))
        if ours == theirs:
            raise OutputError(f"{target} is the source itself.", hint="Choose another folder for the output.")
        if ours.is_relative_to(theirs):
            raise OutputError(f"{target} is inside the source {source}.", hint="Name a folder outside of it.")
    found = target.info()
    if found.type == pafs.FileType.NotFound:
        return
    if found.type != pafs.FileType.Directory:
        what = "s are several" if source.only else " is a folder"
        raise OutputError(f"{target} is a file, and the source{what}.", hint="Name a folder.")
    if not overwrite and _has_files(target):
        raise OutputError(
            f"the folder {target} is not empty.",
            hint="Name another one, give --skip-existing to continue a run that was cut off, or --overwrite to "
            "replace files of the same names in it.",
        )


def _has_files(folder: FileLocation) -> bool:
    """Return whether there is anything but folders, which a failed run may have left."""
    return next(all_files(folder), None) is not None


def _real_path(location: FileLocation) -> str:
    """Return the path without links in it, as far as it exists."""
    return real_location(location).path if location.is_local else location.path.rstrip("/")


@dataclass(frozen=True)
class Contents:
    """What a file says of its values, authenticated if it is encrypted.

    Attributes:
        footer: Its footer.
        deks: DEKs of columns with a column key.
    """

    footer: Footer
    deks: Mapping[tuple[str, ...], SecretBytes]


Open = Callable[[FileLocation], Contents]


def plaintext_contents(location: FileLocation) -> Contents:
    """Read the footer of a plaintext file.

    Raises:
        KeytoolsError: It is none.
    """
    with open_source(location) as source:
        return Contents(read_footer(source, None), {})


def encrypted_contents(
    keys: KeyService,
    location: FileLocation,
    table_name: str | None,
    aad_prefix: str | bytes | None = None,
    *,
    or_allowed_plaintext: bool = False,
) -> Contents:
    """Open an encrypted file that is what its table says, or one in plaintext if the configuration allows that.

    Raises:
        KeytoolsError: It is not, or a key is unavailable.
    """
    (opened,) = keys.open_files([location], table_name, aad_prefix)
    if not or_allowed_plaintext:
        opened.refuse_unencrypted()
    opened.refuse_denied(None)
    return Contents(opened.footer, opened.deks)


def is_there_already(
    source: FileLocation, target: FileLocation, opens_source: Open, opens_target: Open, *, overwrite: bool
) -> bool:
    """Return whether a conversion was done before: the target is newer than the source, and says the same of it.

    Compared are schema, rows, and for each column chunk its type, codec, encodings, number of values and
    statistics, all of them authenticated where a file is encrypted. Values are not.

    Args:
        source: What is converted.
        target: Where the result goes.
        opens_source: Reads its footer.
        opens_target: Reads its footer; fails if it is not what the conversion would make now.
        overwrite: Whether a target that is something else will be replaced.

    Raises:
        OutputError: The target is something else, and must not be replaced.
        KmsError: The KMS does not give the keys that are needed to know it.
        KeytoolsError: The source cannot be read.
    """
    info = target.info()
    if info.type != pafs.FileType.File:
        return False
    made, changed = info.mtime_ns, source.info().mtime_ns
    # Where a file system keeps no times, nothing says that the source is not newer.
    is_newer = made is not None and changed is not None and made >= changed
    if is_newer and _same(opens_source(source), target, opens_target):
        return True
    if not overwrite:
        raise OutputError(
            f"{target} exists already, and is not what converting {source} makes now.",
            hint="Remove it, or give --overwrite to replace it.",
        )
    return False


def _same(source: Contents, target: FileLocation, opens_target: Open) -> bool:
    try:
        found = opens_target(target)
        return _description(source) == _description(found)
    except (KmsError, ColumnAccessDeniedError):
        raise
    except KeytoolsError:
        return False


def _description(contents: Contents) -> tuple[object, ...]:
    footer = contents.footer
    rows = [group.num_rows for group in footer.row_groups]
    chunks = footer.column_metadata(contents.deks)
    return (
        footer.metadata.num_rows,
        footer.leaves,
        rows,
        {place: _of_chunk(metadata) for place, metadata in chunks.items()},
    )


def _of_chunk(metadata: ColumnMetaData) -> bytes:
    """Return what encryption leaves as it is: all but where things lie, and how long they are."""
    rest = metadata.shallow_copy()
    rest.total_uncompressed_size = rest.total_compressed_size = rest.data_page_offset = 0
    rest.index_page_offset = rest.dictionary_page_offset = rest.bloom_filter_offset = None
    rest.bloom_filter_length = None
    return rest.serialise()
