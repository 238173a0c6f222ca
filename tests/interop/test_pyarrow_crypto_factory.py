"""Files between us and a plain CryptoFactory of pyarrow, with a KmsClient over the same master keys."""

from __future__ import annotations

import base64
import itertools
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from soak import sample

from parquet_keytools import Keytools

MASTER_KEYS = {"kf": b"0123456789012345", "kc1": b"1234567890123450", "kc2": b"1234567890123451"}
TABLE = pa.table(
    {
        "number": pa.array(range(1000), pa.int64()),
        "text": [f"text {i % 17}" for i in range(1000)],
        "nested": [{"a": i, "b": [i, None]} for i in range(1000)],
        "plain": pa.array([i / 7 for i in range(1000)]),
    }
)


class PlainKms(pe.KmsClient):
    """The settings of a pyarrow user, for parquet-java's in-memory test KMS."""

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> str:
        nonce = os.urandom(12)
        cipher = AESGCM(MASTER_KEYS[master_key_identifier])
        return base64.b64encode(nonce + cipher.encrypt(nonce, key_bytes, master_key_identifier.encode())).decode()

    def unwrap_key(self, wrapped_key: str, master_key_identifier: str) -> bytes:
        wrapped = base64.b64decode(wrapped_key)
        cipher = AESGCM(MASTER_KEYS[master_key_identifier])
        return cipher.decrypt(wrapped[:12], wrapped[12:], master_key_identifier.encode())


@pytest.fixture
def factory() -> pe.CryptoFactory:
    return pe.CryptoFactory(lambda _: PlainKms())


VARIANTS = [
    {
        "key_material": key_material,
        "double_wrapping": double,
        "data_key_length_bits": bits,
        "plaintext_footer": plaintext_footer,
        "uniform": uniform,
    }
    for key_material, double, bits, plaintext_footer, uniform in itertools.product(
        ["internal", "external"], [True, False], [128, 192, 256], [False, True], [False, True]
    )
]


def variant_id(variant: dict[str, object]) -> str:
    return "-".join(
        [
            str(variant["key_material"]),
            "double" if variant["double_wrapping"] else "single",
            str(variant["data_key_length_bits"]),
            "plaintext_footer" if variant["plaintext_footer"] else "encrypted_footer",
            "uniform" if variant["uniform"] else "columns",
        ]
    )


def variants(offset: int) -> pytest.MarkDecorator:
    """Run a test with every fifth variant, which has each pair of two settings; in a soak, with all."""
    return pytest.mark.parametrize("variant", sample(VARIANTS, 5, offset), ids=variant_id)


def keytools(variant: dict[str, object], **changes: object) -> Keytools:
    settings = {name: value for name, value in variant.items() if name != "uniform"}
    if variant["uniform"]:
        settings |= {"column_keys": {}, "unlisted_columns": "footer_key"}
    else:
        settings |= {"column_keys": {"kc1": ["number", "nested"], "kc2": ["text"]}}
    if variant["double_wrapping"]:
        settings["kek_length_bits"] = 128
    keys = {name: base64.b64encode(key).decode() for name, key in MASTER_KEYS.items()}
    table = {"footer_key": "kf", "unlisted_columns": "plaintext"} | settings | changes
    return Keytools.from_mapping(
        {"version": 1, "kms": {"type": "in_memory", "keys": keys}, "tables": {"t": table}}
    )


def read_with_plain_factory(factory: pe.CryptoFactory, path: Path) -> pa.Table:
    properties = factory.file_decryption_properties(pe.KmsConnectionConfig(), None, str(path), None)
    return pq.read_table(path, decryption_properties=properties)


def assert_encrypted(path: Path, *, plaintext_footer: bool) -> None:
    """A round trip alone would not detect unencrypted files."""
    data = path.read_bytes()
    assert data[:4] == data[-4:] == (b"PAR1" if plaintext_footer else b"PARE")
    assert b"text 3" not in data


@variants(0)
def test_the_plain_factory_reads_what_we_write(
    factory: pe.CryptoFactory, tmp_path: Path, variant: dict[str, object]
) -> None:
    path = tmp_path / "x.parquet"
    result = keytools(variant).write_table(TABLE, path, row_group_size=300, compression="none")
    # With uniform encryption, Arrow ignores plaintext_footer; otherwise it shows size statistics there.
    is_by_pyarrow = not variant["plaintext_footer"] and variant["key_material"] == "internal"
    assert result.engine == ("pyarrow" if is_by_pyarrow else "module encryptor")
    assert_encrypted(path, plaintext_footer=bool(variant["plaintext_footer"]))
    assert (tmp_path / "_KEY_MATERIAL_FOR_x.parquet.json").exists() == (variant["key_material"] == "external")
    assert read_with_plain_factory(factory, path).equals(TABLE)


@variants(1)
def test_the_plain_factory_reads_what_the_module_encryptor_writes(
    factory: pe.CryptoFactory, tmp_path: Path, variant: dict[str, object]
) -> None:
    path = tmp_path / "x.parquet"
    # A stored AAD prefix is the smallest feature that only the module encryptor supports.
    result = keytools(variant, aad_prefix="t/{file_name}").write_table(
        TABLE, path, row_group_size=300, compression="none"
    )
    assert result.engine == "module encryptor"
    assert_encrypted(path, plaintext_footer=bool(variant["plaintext_footer"]))
    assert read_with_plain_factory(factory, path).equals(TABLE)


@variants(2)
def test_we_read_what_the_plain_factory_writes(
    factory: pe.CryptoFactory, tmp_path: Path, variant: dict[str, object]
) -> None:
    path = tmp_path / "x.parquet"
    column_keys = {"kc1": ["number", "nested.a", "nested.b.list.element"], "kc2": ["text"]}
    configuration = pe.EncryptionConfiguration(
        "kf",
        column_keys=None if variant["uniform"] else column_keys,
        uniform_encryption=bool(variant["uniform"]),
        plaintext_footer=bool(variant["plaintext_footer"]),
        double_wrapping=bool(variant["double_wrapping"]),
        internal_key_material=variant["key_material"] == "internal",
        data_key_length_bits=int(str(variant["data_key_length_bits"])),
    )
    properties = factory.file_encryption_properties(pe.KmsConnectionConfig(), configuration, str(path), None)
    pq.write_table(TABLE, path, row_group_size=300, compression="none", encryption_properties=properties)
    assert_encrypted(path, plaintext_footer=bool(variant["plaintext_footer"] and not variant["uniform"]))
    tools = keytools(variant)
    assert tools.read_table(path).equals(TABLE)
    assert tools.read_table(path, columns=["text"], filters=[("number", "<", 5)]).num_rows == 5
    assert tools.dataset(tmp_path).to_table().equals(TABLE)
    if variant["key_material"] == "internal":
        assert pq.read_table(path, decryption_properties=tools.decryption_properties(path)).equals(TABLE)


def test_256_bit_keks_are_read_by_the_plain_factory(factory: pe.CryptoFactory, tmp_path: Path) -> None:
    """Arrow writes KEKs of 128 bits only, but reads ours."""
    path = tmp_path / "x.parquet"
    variant = next(v for v in VARIANTS if v["data_key_length_bits"] == 256 and v["double_wrapping"])
    keytools(variant, kek_length_bits=256).write_table(TABLE, path)
    assert read_with_plain_factory(factory, path).equals(TABLE)


def test_the_plain_factory_reads_our_data_set(factory: pe.CryptoFactory, tmp_path: Path) -> None:
    keytools(VARIANTS[0]).write_dataset(
        TABLE.append_column("part", [["x", "y"] * 500]), tmp_path, partitioning=["part"]
    )
    options = ds.ParquetFragmentScanOptions(
        decryption_config=ds.ParquetDecryptionConfig(
            factory, pe.KmsConnectionConfig(), pe.DecryptionConfiguration()
        )
    )
    dataset = ds.dataset(
        tmp_path, format=ds.ParquetFileFormat(default_fragment_scan_options=options), partitioning="hive"
    )
    assert dataset.to_table().sort_by("number").select(TABLE.column_names).equals(TABLE)


def test_a_plain_factory_with_a_wrong_master_key_reads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    keytools(VARIANTS[0]).write_table(TABLE, path)

    class WrongKms(PlainKms):
        def unwrap_key(self, wrapped_key: str, master_key_identifier: str) -> bytes:
            return super().unwrap_key(wrapped_key, "kc2")

    with pytest.raises(InvalidTag):
        read_with_plain_factory(pe.CryptoFactory(lambda _: WrongKms()), path)


@pytest.mark.parametrize("aad_prefix", [None, "x"], ids=["by_pyarrow", "by_module_encryptor"])
def test_the_instance_id_of_the_configuration_is_written(tmp_path: Path, aad_prefix: str | None) -> None:
    """It is for people, and for readers that choose among several KMSs by it."""
    keys = {name: base64.b64encode(key).decode() for name, key in MASTER_KEYS.items()}
    tools = Keytools.from_mapping(
        {
            "version": 1,
            "kms": {"type": "in_memory", "instance_id": "region-1", "keys": keys},
            "tables": {
                "t": {
                    "footer_key": "kf",
                    "column_keys": {"kc1": ["number"]},
                    "unlisted_columns": "plaintext",
                    "aad_prefix": aad_prefix,
                }
            },
        }
    )
    tools.write_table(TABLE, tmp_path / "x.parquet")
    tools.write_dataset(TABLE, tmp_path / "d")
    for path in (tmp_path / "x.parquet", tmp_path / "d" / "part-0.parquet"):
        assert b'"kmsInstanceID":"region-1"' in path.read_bytes()
        assert tools.read_table(path).equals(TABLE)
