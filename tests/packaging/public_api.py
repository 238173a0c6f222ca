"""The names that users of the package rely on, as they are in the source.

    python tests/packaging/public_api.py

writes them to public_api.txt, which test_public_api.py compares with the source.
"""

from __future__ import annotations

import collections.abc
import importlib
import inspect
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from parquet_keytools import Keytools
from parquet_keytools.kms.client import KmsClient, SingleKeyKmsClient
from parquet_keytools.kms.remote_client import RemoteKmsClient

RECORD = Path(__file__).with_name("public_api.txt")

MODULES: dict[str, list[str] | None] = {
    # module -> its public names; None: the names that it defines without an underscore
    "parquet_keytools": None,
    "parquet_keytools.audit": ["KeyUse", "LOGGER_NAME", "JsonFormatter", "about"],
    "parquet_keytools.config.loader": ["load_configuration", "parse_configuration"],
    "parquet_keytools.config.settings": ["Configuration", "ConfigurationWarning"],
    "parquet_keytools.conformance.report": [
        "DataSetReport",
        "FileReport",
        "Finding",
        "Damage",
        "Loss",
        "Outcome",
        "RuleResult",
        "Verdict",
    ],
    "parquet_keytools.errors": None,
    "parquet_keytools.iceberg": [
        "EncryptedFileIO",
        "EncryptedTable",
        "IcebergKeyManagementClient",
        "create_table",
        "load_table",
    ],
    "parquet_keytools.keytools": ["Keytools"],
    "parquet_keytools.kms.client": [
        "CallerIdentity",
        "KEY_LENGTHS_BYTES",
        "KeyDeletion",
        "KmsClient",
        "KmsSettings",
        "MasterKeyDescription",
        "RewrapRequest",
        "SingleKeyKmsClient",
        "UnwrapRequest",
        "WrapRequest",
    ],
    "parquet_keytools.kms.contract_tests": ["CANARY", "KmsClientContract", "rewrap_one", "unwrap_one", "wrap_one"],
    "parquet_keytools.kms.in_memory": ["InMemoryKms"],
    "parquet_keytools.kms.keystore_file": ["Keystore"],
    "parquet_keytools.kms.passphrase": ["passphrase_from_file"],
    "parquet_keytools.kms.registry": ["ENTRY_POINT_GROUP"],
    "parquet_keytools.kms.remote_client": ["RemoteKmsClient", "RemoteKmsSettings", "RemoteOperation"],
    "parquet_keytools.rotation.report": ["FileRotation", "KeyChange", "KmsCalls", "Outcome", "RotationReport"],
    "parquet_keytools.secret_bytes": ["SecretBytes"],
    "parquet_keytools.spark": None,
    "parquet_keytools.spark.pipelines": None,
    "parquet_keytools.storage.locations": ["FileLocation"],
    "parquet_keytools.telemetry": ["NAME", "use_providers"],
}

HOOKS = {
    "_caller_identity",
    "_cancel_key_deletion",
    "_describe",
    "_key_deletion_state",
    "_may_be_of_others",
    "_operation",
    "_principal",
    "_rewrap_many",
    "_schedule_key_deletion",
    "_translate",
    "_unwrap",
    "_unwrap_many",
    "_wrap",
    "_wrap_many",
}
"""Methods of KmsClient, SingleKeyKmsClient and RemoteKmsClient that backends implement or call."""

_FILE_IO, _TABLE = "parquet_keytools.iceberg.EncryptedFileIO", "parquet_keytools.iceberg.EncryptedTable"

NOT_PROMISED = {
    "parquet_keytools.errors.kms_failure",
    "parquet_keytools.errors.value_or_raise",
    "parquet_keytools.errors.without_frames",
    # For Iceberg tables, whose package is the public one.
    *(f"parquet_keytools.kms.client.KmsClient.{name}" for name in ("wrap_raw", "unwrap_raw")),
    # Parts beyond PyIceberg's own protocol, for other parts of ours.
    *(f"{_FILE_IO}.{name}" for name in ("keys", "open_listed", "open_plaintext")),
    *(f"{_FILE_IO}.{name}" for name in ("read_all", "read_metadata", "stored_output", "table_at")),
    *(f"{_TABLE}.{name}" for name in ("commit_updates", "known", "reader")),
}
"""Public in form only."""


def public_api(*, inherited: bool = False) -> list[str]:
    """Return every public name, one a line, with the parameters of callables.

    Args:
        inherited: Whether a class is listed with its inherited members, too.
    """
    lines = {line for module in MODULES for line in _of_module(module, inherited)}
    lines = {line for line in lines if line.partition("(")[0] not in NOT_PROMISED}
    lines |= set(_of_results())
    return sorted(lines)


def _of_module(name: str, inherited: bool) -> Iterator[str]:
    module = importlib.import_module(name)
    names = MODULES[name] or getattr(module, "__all__", None) or [*_defined_in(module)]
    for member in names:
        full_name = f"{name}.{member}"
        if full_name not in NOT_PROMISED:
            value = getattr(module, member)
            # Names that the package itself offers are listed with their members where they are defined.
            yield from [full_name] if name == "parquet_keytools" else _lines(full_name, value, inherited)


def _defined_in(module: Any) -> Iterator[str]:
    for name, value in vars(module).items():
        is_own = getattr(value, "__module__", module.__name__) == module.__name__
        if is_own and not name.startswith("_") and not isinstance(value, (typing.TypeVar, types.ModuleType)):
            yield name


def _lines(name: str, value: Any, inherited: bool) -> Iterator[str]:
    """Yield the lines of a class, with its members, of a function, or of a constant."""
    if not inspect.isclass(value):
        yield f"{name}({', '.join(_parameters(value))})" if callable(value) else name
        return
    is_settings = issubclass(value, BaseModel)
    makes_itself = "__init__" in vars(value) and not is_settings
    yield f"{name}({', '.join(_parameters(value))})" if makes_itself else name
    for member in sorted(_members(*(value.__mro__ if inherited else [value]))):
        attribute = inspect.getattr_static(value, member, None)
        if isinstance(attribute, (classmethod, staticmethod)):
            attribute = attribute.__func__
        shown = f"({', '.join(_parameters(attribute))})" if inspect.isfunction(attribute) else ""
        yield f"{name}.{member}{shown}"


def _members(*classes: type) -> set[str]:
    """Return the public names that classes define."""
    hooks = HOOKS if {KmsClient, RemoteKmsClient, SingleKeyKmsClient} & set(classes) else set()
    names = {name for cls in classes for name in vars(cls).keys() | inspect.get_annotations(cls).keys()}
    # Names that pydantic adds begin with model_, and only pytest calls names that begin with test_.
    return {name for name in names if not name.startswith(("_", "model_", "test_")) or name in hooks}


def _parameters(function: Any) -> list[str]:
    """Return the parameters that a caller can name, and how the others are passed."""
    marks: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = inspect.signature(function).parameters.values()
    shown = [marks.get(item.kind, "") + item.name for item in parameters]
    return [name for name in shown if name not in ("self", "cls")]


def _of_results() -> Iterator[str]:
    """Yield the attributes of objects that methods of Keytools return, wherever their class is."""
    for name, method in inspect.getmembers(Keytools, inspect.isfunction):
        annotation = method.__annotations__.get("return")
        if name.startswith("_") or annotation is None:
            continue
        try:
            returned = eval(annotation, method.__globals__ | {"Iterator": collections.abc.Iterator})
        except (NameError, AttributeError):
            continue  # A class of pyarrow, which only the type checker knows.
        for cls in (returned, *typing.get_args(returned)):
            if inspect.isclass(cls) and cls.__module__.startswith("parquet_keytools") and cls is not Keytools:
                yield from (f"Keytools.{name}() -> {member}" for member in _members(*cls.__mro__))


def missing(recorded: list[str], present: list[str]) -> list[str]:
    """Return the recorded names that are gone, or can no longer be called as before.

    An added parameter does no harm; a removed or renamed one does.
    """
    now = {_name_of(line): line for line in present}
    gone = []
    for line in recorded:
        found = now.get(_name_of(line))
        if found is None:
            gone.append(line)
        elif ("(" in line) > ("(" in found) or not _parameters_of(line) <= _parameters_of(found):
            gone.append(f"{line}, which is now {found}")
    return gone


def _name_of(line: str) -> str:
    return line if " -> " in line else line.partition("(")[0]


def _parameters_of(line: str) -> set[str]:
    return set() if " -> " in line else {name for name in re.split(r"[(), ]+", line.partition("(")[2]) if name}


def recorded_api() -> list[str]:
    """Return the recorded names."""
    return RECORD.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    RECORD.write_text("".join(f"{line}\n" for line in public_api()), encoding="utf-8")
