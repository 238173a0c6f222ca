"""A column whose encryption differs between the first row group and the second."""

from __future__ import annotations

import base64
from pathlib import Path

import pyarrow as pa
import pytest

from parquet_keytools import Keytools
from parquet_keytools.encryption.aad import FOOTER_PLACE
from parquet_keytools.encryption.footer import read_envelope
from parquet_keytools.encryption.module_cipher import ModuleCipher
from parquet_keytools.errors import KeytoolsError
from parquet_keytools.format.file_layout import MAGIC_ENCRYPTED_FOOTER, with_trailer
from parquet_keytools.format.structs import FileCryptoMetaData, FileMetaData
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation, open_source

KEYS = {name: bytes([number]) * 16 for number, name in enumerate(("kf", "ka", "kb"), 1)}
TOOLS = Keytools.from_mapping(
    {
        "version": 1,
        "data_keys": {name: base64.b64encode(key).decode() for name, key in KEYS.items()},
        "tables": {"t": {"footer_key": "kf", "column_keys": {"ka": ["a"], "kb": ["b"]}}},
    }
)


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    """Return a file whose second row group states the key of column a for column b."""
    path = tmp_path / "t.parquet"
    TOOLS.write_table(pa.table({"a": [1, 2], "b": [3, 4]}), path, row_group_size=1)
    data = path.read_bytes()
    with open_source(FileLocation.resolve(path)) as source:
        envelope = read_envelope(source)
    cipher = ModuleCipher(SecretBytes(KEYS["kf"]), envelope.file_aads()[0])
    metadata, _ = FileMetaData.read(cipher.decrypt(envelope.body, FOOTER_PLACE))
    crypto = metadata.row_groups[1].columns[1].crypto_metadata
    assert crypto is not None and crypto.encryption_with_column_key is not None
    crypto.encryption_with_column_key.key_metadata = b"ka"
    _, end = FileCryptoMetaData.read(data, envelope.footer_offset)
    head = data[envelope.footer_offset : end]
    footer = head + cipher.encrypt(metadata.serialise(), FOOTER_PLACE)
    path.write_bytes(data[: envelope.footer_offset] + with_trailer(footer, MAGIC_ENCRYPTED_FOOTER))
    return path


def test_every_reader_of_the_column_refuses_it(uneven: Path, tmp_path: Path) -> None:
    for read in (
        lambda: TOOLS.read_table(uneven),
        lambda: TOOLS.read_table(uneven, columns=["b"]),
        lambda: TOOLS.dataset(uneven).to_table(columns=["b"]),
        lambda: TOOLS.decrypt_file(uneven, tmp_path / "plain.parquet"),
        lambda: TOOLS.rekey_file(uneven, tmp_path / "rekeyed.parquet"),
    ):
        with pytest.raises(KeytoolsError, match="row group 1: column 'b' is encrypted in another way"):
            read()
    assert not TOOLS.verify_file(uneven).conforms
    assert sorted(file.name for file in tmp_path.iterdir()) == ["t.parquet"]


def test_another_column_is_read(uneven: Path) -> None:
    assert TOOLS.read_table(uneven, columns=["a"]).to_pydict() == {"a": [1, 2]}
