"""Files with keys in named KMSs: what other readers can open, and Spark with our bridge."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from engines.ours import base64_keys
from engines.sample import MASTER_KEYS

from parquet_keytools import Keytools
from parquet_keytools.spark import session_settings

if TYPE_CHECKING:
    from engines.spark import Spark

TABLE = pa.table({"id": [1, 2, 3], "name": ["x", "y", "z"], "claim": [1.5, 2.5, None]})
OTHER_KEYS = {name: os.urandom(16) for name in MASTER_KEYS}
BY_NAME = {**MASTER_KEYS, **{f"other::{name}": key for name, key in OTHER_KEYS.items()}}
WRITERS: dict[str, dict[str, Any]] = {
    "pyarrow": {},
    "module encryptor": {"data_key_length_bits": 256},
    "external": {"key_material": "external"},
}
every_writer = pytest.mark.parametrize("settings", WRITERS.values(), ids=WRITERS)


def keytools(folder: Path, *, claims: str, **settings: Any) -> Keytools:
    """Return a configuration whose column `claim` is under a master key in one of two KMSs."""
    document = {
        "version": 1,
        "kms": {
            "one": {"type": "in_memory", "keys": base64_keys(MASTER_KEYS)},
            "other": {"type": "in_memory", "keys": base64_keys(OTHER_KEYS)},
        },
        "master_keys": {
            "footer": {"kms": "one", "id": "footer"},
            "names": {"kms": "one", "id": "pii"},
            "claims": {"kms": claims, "id": "pii"},
        },
        "tables": {
            "t": {
                "footer_key": "footer",
                "column_keys": {"names": ["name"], "claims": ["claim"]},
                "unlisted_columns": "footer_key",
                **settings,
            }
        },
    }
    path = folder / "keytools.yaml"
    path.write_text(json.dumps(document))
    path.chmod(0o600)
    return Keytools.from_yaml(path)


class PlainKms(pe.KmsClient):
    """The settings of a pyarrow user, with master keys by the identifier in the file."""

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> str:
        raise NotImplementedError

    def unwrap_key(self, wrapped_key: str, master_key_identifier: str) -> bytes:
        wrapped, within = base64.b64decode(wrapped_key), master_key_identifier.rpartition("::")[2]
        return AESGCM(BY_NAME[master_key_identifier]).decrypt(wrapped[:12], wrapped[12:], within.encode())


def plain_pyarrow(path: Path) -> pa.Table:
    factory = pe.CryptoFactory(lambda _: PlainKms())
    # Without an instance, pyarrow takes it from the file.
    properties = factory.file_decryption_properties(pe.KmsConnectionConfig(), pe.DecryptionConfiguration())
    return pq.ParquetFile(path, decryption_properties=properties).read()


@every_writer
def test_others_read_a_file_with_all_keys_in_one_kms(
    spark: Spark, tmp_path: Path, settings: dict[str, Any]
) -> None:
    from engines.spark import KMS_OPTIONS

    path = tmp_path / "file.parquet"
    keytools(tmp_path, claims="one", **settings).write_table(TABLE, path)
    assert spark.read_with(path, KMS_OPTIONS).to_pylist() == TABLE.to_pylist()
    if "key_material" not in settings:
        assert b'"kmsInstanceID":"one"' in path.read_bytes()
        assert plain_pyarrow(path).equals(TABLE)


def test_pyarrow_shows_the_kms_of_a_column_to_its_client(tmp_path: Path) -> None:
    path = tmp_path / "file.parquet"
    keytools(tmp_path, claims="other", data_key_length_bits=256).write_table(TABLE, path)
    assert plain_pyarrow(path).equals(TABLE)


def bridge(tools: Keytools) -> dict[str, str]:
    """Return the session settings of `configure`, as options of a read or write."""
    start = "spark.hadoop."
    settings = session_settings(tools.configuration)
    return {name.removeprefix(start): value for name, value in settings.items() if name.startswith(start)}


@pytest.mark.parametrize("claims", ["one", "other"])
@every_writer
def test_spark_with_our_bridge_reads_and_writes(
    spark: Spark, tmp_path: Path, settings: dict[str, Any], claims: str
) -> None:
    tools = keytools(tmp_path, claims=claims, **settings)
    path = tmp_path / "file.parquet"
    tools.write_table(TABLE, path)
    options = bridge(tools) | tools.spark_read_options("t")
    assert spark.read_with(path, options).to_pylist() == TABLE.to_pylist()
    if "key_material" in settings:
        return
    frame = spark.session.read.options(**options).parquet(str(path))
    written = spark.write_frame(frame, tmp_path / "spark", bridge(tools) | tools.spark_options("t", frame.schema))
    assert tools.read_table(written).to_pylist() == TABLE.to_pylist()
    assert spark.read_with(written, options).to_pylist() == TABLE.to_pylist()
    (file,) = tools.key_inventory(written)
    assert {use.column: use.master_key_id for use in file.uses} == {
        None: "one::footer",
        "name": "one::pii",
        "claim": f"{claims}::pii",
    }


def test_spark_refuses_a_file_whose_kms_was_altered(spark: Spark, tmp_path: Path) -> None:
    tools = keytools(tmp_path, claims="one")
    path = tmp_path / "file.parquet"
    tools.write_table(TABLE, path)
    content = path.read_bytes()
    options = bridge(tools) | tools.spark_read_options("t")
    for name, expected in {"two": "names the KMS 'two'", "six": "names the KMS 'six'"}.items():
        path.write_bytes(content.replace(b'"kmsInstanceID":"one"', f'"kmsInstanceID":"{name}"'.encode()))
        with pytest.raises(RuntimeError, match=expected):
            spark.read_with(path, options)
