"""Every error that parquet-keytools raises, in one tree with one root.

Each error carries its facts as attributes, and its text says what happened, where, and what to do next. No
text and no attribute ever holds a key, a token or the body of a KMS response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from parquet_keytools.errors import root
from parquet_keytools.errors.root import *  # noqa: F403 - all that is in its __all__
from parquet_keytools.errors.root import KeytoolsError

# In the order in which the reference shows them.
__all__ = root.__all__ + [  # noqa: RUF005
    "ParquetFormatError",
    "DraftFormatError",
    "FormatLimitError",
    "FileChangedError",
    "NoParquetFilesError",
    "IncompleteDataSetError",
    "KeyMaterialError",
    "VisibleMetadataError",
    "NotEncryptedError",
    "TableMismatch",
    "TableMismatchError",
    "ReusedKeysError",
    "AlreadyEncryptedError",
    "OutputError",
    "StorageFailedError",
    "ChangedMeanwhileError",
    "DecryptionError",
    "FooterSignatureError",
    "AadPrefixError",
    "FolderNameError",
    "KeyNotAvailableError",
    "ColumnAccessDeniedError",
]

# Tracebacks and pickles have the names that callers import.
for _name in root.__all__:
    if isinstance(globals()[_name], type):
        globals()[_name].__module__ = __name__


# --- what is wrong with a file: its format, its table, its place, its modules or its keys ---


class ParquetFormatError(KeytoolsError):
    """Bytes are not what the Parquet format says.

    Attributes:
        path: The file, or None where only bytes are known.
    """

    def __init__(self, message: str, *, path: str | None = None, hint: str = "") -> None:
        super().__init__(f"{path}: {message}" if path else message, hint=hint)
        self.path = path


class DraftFormatError(ParquetFormatError):
    """The file follows a draft of the encryption specification that was never in force."""


class FormatLimitError(KeytoolsError):
    """The file would break a limit of the format or of its ciphers (spec 4.1.4, 4.4.2)."""


class FileChangedError(ParquetFormatError):
    """The file is another one than a moment ago: it was written again, or altered."""


class NoParquetFilesError(ParquetFormatError):
    """A folder that is to be a data set has no Parquet files: nothing can be said of it, and nothing done."""

    def __init__(
        self,
        message: str = "the folder has no Parquet files.",
        *,
        path: str | None = None,
        hint: str = "Check the path.",
    ) -> None:
        super().__init__(message, path=path, hint=hint)


class IncompleteDataSetError(KeytoolsError):
    """Something in a data set cannot be looked into, such as a link to what is not there: rows would be missing.

    Attributes:
        entries: Path of each such thing, and why.
    """

    def __init__(self, entries: Sequence[tuple[str, str]], *, hint: str = "") -> None:
        shown = "; ".join(f"{path}: {reason}" for path, reason in entries[:5])
        more = f"; and {len(entries) - 5} more" if len(entries) > 5 else ""
        super().__init__(f"parts of the data set could not be checked: {shown}{more}.", hint=hint)
        self.entries = tuple(entries)


class KeyMaterialError(ParquetFormatError):
    """Key metadata or key material is not valid."""


class VisibleMetadataError(KeytoolsError):
    """A plaintext footer would show metadata that may hold values of encrypted columns."""


class NotEncryptedError(KeytoolsError):
    """A plaintext file lies where an encrypted one is expected."""


@dataclass(frozen=True, slots=True)
class TableMismatch:
    """One thing of a file that is not what its table says.

    Attributes:
        what: `algorithm`, `footer key`, `column key`, or `plaintext column`: one that the table has under a key.
        column: Dotted path of the column; None where it is about the whole file.
        wanted: What the table says.
        found: What the file says, which may be anybody's text.
    """

    what: Literal["algorithm", "footer key", "column key", "plaintext column"]
    column: str | None
    wanted: str
    found: str

    def __str__(self) -> str:
        if self.what == "algorithm":
            return f"the algorithm is {self.found}, and the table has {self.wanted}"
        if self.column is None:
            return f"the footer is under {self.found}, and the table has {self.wanted}"
        state = "in plaintext" if self.what == "plaintext column" else f"under {self.found}"
        return f"column {self.column[:200]!r} is {state}, and the table has {self.wanted}"


class TableMismatchError(KeytoolsError):
    """The file is not what its table says: keys, algorithm, or columns in plaintext.

    Attributes:
        path: The file.
        table: Name of the table.
        mismatches: All that differs.
    """

    def __init__(self, path: str, table: str, mismatches: Sequence[TableMismatch], *, hint: str = "") -> None:
        shown = "; ".join(map(str, mismatches[:_MOST_MISMATCHES]))
        others = len(mismatches) - _MOST_MISMATCHES
        more = f"; and {others} more" if others > 0 else ""
        super().__init__(f"{path}: this is not a file of the table {table!r}: {shown}{more}.", hint=hint)
        self.path = path
        self.table = table
        self.mismatches = tuple(mismatches)


_MOST_MISMATCHES = 5
"""So many are in the text of the error."""


class ReusedKeysError(KeytoolsError):
    """Two files share data keys and file unique: encryption properties were used twice, or one is a copy.

    Attributes:
        path: The file.
        other_path: The one that was opened before.
    """

    def __init__(self, path: str, other_path: str, *, hint: str = "") -> None:
        super().__init__(
            f"{path} and {other_path} share their data keys and file unique: both were written with one and the "
            "same encryption properties, or one is a copy of the other. Parts of one can replace parts of the "
            "other undetected.",
            hint=hint,
        )
        self.path = path
        self.other_path = other_path


class AlreadyEncryptedError(KeytoolsError):
    """The file to be encrypted is encrypted already."""


class OutputError(KeytoolsError):
    """The output cannot be written there."""


class StorageFailedError(OutputError):
    """The file system takes no more: it is full, read-only or broken. Other files would fare no better.

    Attributes:
        error_number: What the operating system said, as in `errno`; 0 where it said nothing.
    """

    def __init__(self, message: str, *, error_number: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.error_number = error_number


class ChangedMeanwhileError(KeytoolsError):
    """A file is no longer the one that was read; it is read again."""


class DecryptionError(KeytoolsError):
    """Bytes do not authenticate, or cannot be decrypted.

    Attributes:
        path: The file, or None where only bytes are known.
        column: Dotted path of the column, or None.
        module_type: Name of the module type (spec 4.4.2), or None where no module is concerned.
        row_group_ordinal: From 0, or None.
        column_ordinal: From 0, or None.
        page_ordinal: From 0, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        module_type: str | None = None,
        row_group_ordinal: int | None = None,
        column_ordinal: int | None = None,
        page_ordinal: int | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.path: str | None = None
        self.column: str | None = None
        self.module_type = module_type
        self.row_group_ordinal = row_group_ordinal
        self.column_ordinal = column_ordinal
        self.page_ordinal = page_ordinal

    def __str__(self) -> str:
        text = super().__str__()
        facts = (
            (self.module_type, "{}"),
            (self.row_group_ordinal, "row group {}"),
            (self.column_ordinal, "column {}" if self.column is None else f"column {{}} ({self.column!r})"),
            (self.page_ordinal, "page {}"),
        )
        place = ", ".join(form.format(fact) for fact, form in facts if fact is not None)
        # Some texts begin with the file.
        path = self.path if self.path is not None and not text.startswith(self.path) else None
        return ": ".join(filter(None, [path, place, text]))


class FooterSignatureError(DecryptionError):
    """The signature of a plaintext footer is missing or wrong (spec 5.5)."""


class AadPrefixError(DecryptionError):
    """The AAD prefix is missing, or not the one that is expected (spec 4.4.1)."""


class FolderNameError(DecryptionError):
    """The name of a folder gives values to a column that is under a key: readers would take them for its own.

    Attributes:
        folder: Name of the folder.
        column: Name of the column.
    """

    def __init__(self, path: str, folder: str, column: str) -> None:
        super().__init__(
            f"{path}: the name of a folder gives values to {column[:200]!r}, which is under a key: "
            f"{folder[:200]!r}. Nothing authenticates the names of folders.",
            hint="The file was moved there, or a writer partitioned by that column. Move the file to a folder "
            "with another name.",
        )
        self.path = path
        self.folder = folder
        self.column = column


class KeyNotAvailableError(KeytoolsError):
    """No key is known for a part of the file: its key metadata is empty or names no key of ours."""


class ColumnAccessDeniedError(KeytoolsError):
    """A read asks for columns whose keys are unavailable.

    Attributes:
        columns: Dotted paths of these columns.
        causes: For each of them the error that says why its key is unavailable.
    """

    def __init__(self, columns: Sequence[str], causes: Sequence[KeytoolsError], *, hint: str = "") -> None:
        reasons = " ".join(dict.fromkeys(str(cause) for cause in causes))
        super().__init__(f"cannot read {', '.join(map(repr, columns))}: {reasons}", hint=hint)
        self.columns = tuple(columns)
        self.causes = tuple(causes)
