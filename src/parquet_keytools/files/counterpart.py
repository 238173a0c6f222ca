"""Whether a file is what a conversion of another one would make: a run that was cut off need not make it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pyarrow import fs as pafs

from parquet_keytools.encryption.footer import Footer, read_footer
from parquet_keytools.errors import ColumnAccessDeniedError, KeytoolsError, KmsError, OutputError
from parquet_keytools.files.key_service import KeyService
from parquet_keytools.format.structs import ColumnMetaData
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.sources import open_source


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
    aad_prefix: str | None = None,
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
    rest = metadata.copy()
    rest.total_uncompressed_size = rest.total_compressed_size = rest.data_page_offset = 0
    rest.index_page_offset = rest.dictionary_page_offset = rest.bloom_filter_offset = None
    rest.bloom_filter_length = None
    return rest.serialise()
