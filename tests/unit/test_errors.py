import inspect
import pickle

import pytest

from parquet_keytools import errors
from parquet_keytools.errors import (
    ColumnAccessDeniedError,
    ConfigurationError,
    DecryptionError,
    FolderNameError,
    IncompleteDataSetError,
    KeytoolsError,
    KmsAccessDeniedError,
    KmsError,
    KmsThrottledError,
    KmsUnavailableError,
    ParquetFormatError,
    ReusedKeysError,
    TableMismatch,
    TableMismatchError,
    UnsupportedByArrowError,
    UnsupportedByPolarsError,
    UnsupportedBySparkError,
)

CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, BaseException) and value.__module__ == errors.__name__
]


def example(cls: type[KeytoolsError]) -> KeytoolsError:
    """One error of a class, with every attribute that it can have."""
    if issubclass(cls, KmsError):
        return cls("why", backend="vault", operation="wrap", master_key_id="pii", hint="Do that.")
    if issubclass(cls, ConfigurationError):
        return cls("wrong", file="a.yaml", line=3, yaml_path="tables.t", hint="Do that.")
    if issubclass(cls, (UnsupportedByArrowError, UnsupportedByPolarsError, UnsupportedBySparkError)):
        return cls(["no CTR", "no Bloom filters"], hint="Do that.")
    if issubclass(cls, IncompleteDataSetError):
        return cls([("a/b", "a pipe")], hint="Do that.")
    if issubclass(cls, ParquetFormatError):
        return cls("wrong", path="a.parquet", hint="Do that.")
    if issubclass(cls, TableMismatchError):
        mismatch = TableMismatch("column key", "a.b", "the master key 'pii'", "the master key 'ads'")
        return cls("a.parquet", "flights", [mismatch, mismatch], hint="Do that.")
    if issubclass(cls, FolderNameError):
        error = cls("a.parquet", "ssn=1", "ssn")
        error.hint = "Do that."
        return error
    if issubclass(cls, DecryptionError):
        ordinals = {"row_group_ordinal": 0, "column_ordinal": 1, "page_ordinal": 2}
        return cls("wrong", module_type="DATA_PAGE", **ordinals, hint="Do that.")
    if issubclass(cls, ColumnAccessDeniedError):
        cause = KmsAccessDeniedError(backend="aws", operation="unwrap", master_key_id="pii")
        return cls(["a.b", "c"], [cause, cause], hint="Do that.")
    if issubclass(cls, ReusedKeysError):
        return cls("b.parquet", "a.parquet", hint="Do that.")
    return cls("wrong", hint="Do that.")


def facts(error: KeytoolsError) -> dict[str, object]:
    return {name: repr(value) for name, value in error.__dict__.items()}


def test_there_is_one_tree() -> None:
    assert len(CLASSES) > 20
    assert [cls for cls in CLASSES if not issubclass(cls, KeytoolsError)] == []


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_survives_a_pickle(cls: type[KeytoolsError]) -> None:
    error = example(cls)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))
        assert type(again) is cls
        assert str(again) == str(error)
        assert facts(again) == facts(error)
        assert again.hint == "Do that."


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_says_what_to_do_next(cls: type[KeytoolsError]) -> None:
    assert str(example(cls)).endswith("Do that.")
    assert cls.__doc__


def test_attributes_a_plugin_adds_survive_a_pickle() -> None:
    error = PluginError("why", backend="acme", operation="wrap")
    error.request_id = "r-1"
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.request_id, str(again)) == (PluginError, "r-1", str(error))
    assert error.after(3, 1.0).tries == 3


class PluginError(KmsUnavailableError):
    request_id: str = ""


def test_kms_error_text() -> None:
    error = KmsAccessDeniedError("policy 7", backend="vault", operation="unwrap", master_key_id="pii")
    assert str(error) == (
        "vault: unwrap with master key 'pii': access denied: policy 7. "
        "Ask for the permission, or read without the columns under this master key."
    )
    assert str(KmsError(backend="b", operation="connect", hint="")) == "b: connect: the KMS failed."


def test_only_what_passes_is_worth_a_retry() -> None:
    retryable = {cls for cls in CLASSES if issubclass(cls, KmsError) and cls.retryable}
    assert retryable == {KmsThrottledError, KmsUnavailableError}


def test_configuration_error_says_where() -> None:
    assert str(ConfigurationError("wrong.", file="a.yaml", line=3, yaml_path="kms.type")) == (
        "a.yaml:3: kms.type: wrong."
    )
    assert str(ConfigurationError("wrong.", file="a.yaml")) == "a.yaml: wrong."
    assert str(ConfigurationError("wrong.", line=3)) == "wrong."


def test_decryption_error_names_ordinal_zero() -> None:
    error = DecryptionError("wrong", module_type="DATA_PAGE", row_group_ordinal=0, page_ordinal=0)
    assert str(error) == "DATA_PAGE, row group 0, page 0: wrong"
    error.path = "/data/x.parquet"
    assert str(error) == "/data/x.parquet: DATA_PAGE, row group 0, page 0: wrong"
    named = DecryptionError("/data/x.parquet says wrong", column_ordinal=0, hint="Look.")
    named.path, named.column = "/data/x.parquet", "a.b"
    assert str(named) == "column 0 ('a.b'): /data/x.parquet says wrong Look."


def test_one_reason_for_many_columns_is_given_once() -> None:
    error = example(ColumnAccessDeniedError)
    assert isinstance(error, ColumnAccessDeniedError)
    assert str(error).count("access denied") == 1
    assert "'a.b', 'c'" in str(error)
    assert len(error.causes) == 2
