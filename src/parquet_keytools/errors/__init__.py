"""Every error that parquet-keytools raises, in one tree with one root.

Each error carries its facts as attributes, and its text says what happened, where, and what to do next. No
text and no attribute ever holds a key, a token or the body of a KMS response.
"""

from __future__ import annotations

from parquet_keytools.errors.files import (
    AadPrefixError,
    AlreadyEncryptedError,
    ChangedMeanwhileError,
    ColumnAccessDeniedError,
    DecryptionError,
    DraftFormatError,
    FileChangedError,
    FooterSignatureError,
    FormatLimitError,
    IncompleteDataSetError,
    KeyMaterialError,
    KeyNotAvailableError,
    NoParquetFilesError,
    NotEncryptedError,
    OutputError,
    ParquetFormatError,
    ReusedKeysError,
    StorageFailedError,
    TableMismatch,
    TableMismatchError,
    VisibleMetadataError,
)
from parquet_keytools.errors.root import (
    KEY_REFUSALS,
    ConfigurationError,
    KeytoolsError,
    KmsAccessDeniedError,
    KmsConfigurationError,
    KmsError,
    KmsResponseInvalidError,
    KmsThrottledError,
    KmsUnavailableError,
    MasterKeyDisabledError,
    MasterKeyNotFoundError,
    MasterKeyNotTrustedError,
    SparkJobFailedError,
    UnsupportedByArrowError,
    UnsupportedBySparkError,
    WorkerProcessEndedError,
    WrappedKeyInvalidError,
    value_or_raise,
    without_frames,
)

# In the order in which the reference shows them.
__all__ = [  # noqa: RUF022
    "KeytoolsError",
    "ConfigurationError",
    "UnsupportedByArrowError",
    "UnsupportedBySparkError",
    "SparkJobFailedError",
    "WorkerProcessEndedError",
    "value_or_raise",
    "without_frames",
    "KmsError",
    "KmsAccessDeniedError",
    "MasterKeyNotFoundError",
    "MasterKeyNotTrustedError",
    "MasterKeyDisabledError",
    "WrappedKeyInvalidError",
    "KEY_REFUSALS",
    "KmsThrottledError",
    "KmsUnavailableError",
    "KmsConfigurationError",
    "KmsResponseInvalidError",
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
    "KeyNotAvailableError",
    "ColumnAccessDeniedError",
]

# Tracebacks and pickles have the names that callers import.
for _name in __all__:
    if isinstance(globals()[_name], type):
        globals()[_name].__module__ = __name__
