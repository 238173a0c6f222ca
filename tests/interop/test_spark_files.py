"""Files of Spark through the module encryptor, and key material from Spark to us and back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pyarrow.parquet as pq
import pytest
from engines import policy as policies
from engines.ours import ARROW_PATH, MODULE_PATH, ArrowPath, ModulePath, base64_keys, keytools
from engines.policy import EncryptedFile, Policy
from engines.sample import BLOOM_FILTERS, MASTER_KEYS, PAGE_ROWS, ROW_GROUP_ROWS, ROWS, TABLE, write_plain
from matrix import SPARK
from soak import SOAK

from parquet_keytools import Keytools
from parquet_keytools.errors import DecryptionError

if TYPE_CHECKING:
    from engines.spark import Spark

pytestmark = [
    pytest.mark.filterwarnings("ignore::parquet_keytools.config.settings.ConfigurationWarning"),
]

EXPECTED = TABLE.to_pylist()
CODECS = ("uncompressed", "snappy", "gzip", "zstd", "lz4_raw", "lz4")

PLACES: tuple[Literal["internal"], Literal["external"]] = ("internal", "external")
KEY_MATERIAL = [
    Policy(
        f"{length_bits} bits, {'double' if double_wrapping else 'single'} wrapping, {key_material}",
        length_bits=length_bits,
        double_wrapping=double_wrapping,
        key_material=key_material,
    )
    for length_bits in (128, 256)
    for double_wrapping in (True, False)
    for key_material in PLACES
    # Each pair occurs.
    if SOAK or (length_bits == 128) ^ double_wrapping ^ (key_material == "internal")
]
MODES = [
    *KEY_MATERIAL,
    policies.FOOTER_KEY,
    policies.UNLISTED,
    policies.PLAINTEXT_FOOTER,
    policies.CTR,
    replace(policies.CTR, title="CTR, plaintext footer", plaintext_footer=True),
    replace(policies.FOOTER_KEY, title="footer key, plaintext footer", plaintext_footer=True),
]


@pytest.fixture(scope="module")
def plain(spark: Spark, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A plaintext file that Spark wrote, with page index, Bloom filters and CRCs."""
    yield _spark_writes(spark, tmp_path_factory.mktemp("plain"), "snappy", 1)


def _spark_writes(spark: Spark, folder: Path, codec: str, data_page_version: int) -> Path:
    from engines.spark import BLOOM_FILTER_OPTIONS, LAYOUT_OPTIONS

    frame = spark.session.read.parquet(str(write_plain(folder / "arrow.parquet", policies.COLUMN_KEYS)))
    options = {"compression": codec, "parquet.writer.version": f"PARQUET_{data_page_version}_0"}
    return spark.write_frame(frame, folder / "plain", LAYOUT_OPTIONS | BLOOM_FILTER_OPTIONS | options)


@pytest.mark.parametrize(
    ("codec", "data_page_version"),
    [*((codec, 1) for codec in CODECS), *((codec, 2) for codec in (CODECS if SOAK else CODECS[:2]))],
)
def test_every_codec_there_and_back(spark: Spark, tmp_path: Path, codec: str, data_page_version: int) -> None:
    source = _spark_writes(spark, tmp_path, codec, data_page_version)
    chunk = pq.read_metadata(source).row_group(0).column(3)
    assert chunk.has_column_index and chunk.has_offset_index and chunk.bloom_filter_offset
    tools = keytools(policies.COLUMN_KEYS)
    encrypted = tmp_path / "encrypted.parquet"
    tools.encrypt_file(source, encrypted)
    file = EncryptedFile(MODULE_PATH, policies.COLUMN_KEYS, encrypted)
    if data_page_version == 1:  # Spark cannot read V2 pages that are encrypted as a whole.
        assert spark.read(file).to_pylist() == EXPECTED
    assert tools.read_table(encrypted).to_pylist() == EXPECTED
    tools.decrypt_file(encrypted, tmp_path / "decrypted.parquet")
    assert (tmp_path / "decrypted.parquet").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("policy", MODES, ids=lambda policy: policy.title)
def test_we_encrypt_and_spark_reads(spark: Spark, plain: Path, tmp_path: Path, policy: Policy) -> None:
    path = tmp_path / "file.parquet"
    keytools(policy).encrypt_file(plain, path)
    assert _has_external_material(path) == (policy.key_material == "external")
    assert spark.read(EncryptedFile(MODULE_PATH, policy, path)).to_pylist() == EXPECTED


@pytest.mark.parametrize("policy", MODES, ids=lambda policy: policy.title)
def test_spark_writes_and_we_read(spark: Spark, tmp_path: Path, policy: Policy) -> None:
    path = spark.write(policy, tmp_path)
    assert _has_external_material(path) == (policy.key_material == "external")
    for name, reader in ((ARROW_PATH, ArrowPath()), (MODULE_PATH, ModulePath())):
        assert reader.read(EncryptedFile(SPARK, policy, path)).to_pylist() == EXPECTED, name


def _has_external_material(path: Path) -> bool:
    return path.with_name(f"_KEY_MATERIAL_FOR_{path.name}.json").is_file()


def test_we_rekey_and_spark_reads(spark: Spark, tmp_path: Path) -> None:
    source = spark.write(policies.PLAINTEXT_FOOTER, tmp_path)
    old = keytools(policies.PLAINTEXT_FOOTER)
    path = tmp_path / "rekeyed.parquet"
    policy = policies.EXTERNAL
    old.rekey_file(source, path, new_keytools=keytools(policy))
    assert spark.read(EncryptedFile(MODULE_PATH, policy, path)).to_pylist() == EXPECTED


@pytest.fixture(scope="module")
def all_encrypted(plain: Path) -> Path:
    """The file with all columns under their own key, so that no chunk's metadata is visible."""
    tools = Keytools.from_mapping(
        {
            "version": 1,
            "kms": {"type": "in_memory", "keys": base64_keys(MASTER_KEYS)},
            "tables": {
                "sample": {"footer_key": "footer", "column_keys": {"pii": ["*"]}, "unlisted_columns": "plaintext"}
            },
        }
    )
    path = plain.with_name("all_encrypted.parquet")
    tools.encrypt_file(plain, path)
    return path


OTHER_FILTERS = ("stats", "dictionary", "columnindex", "bloom")


@pytest.mark.parametrize(
    ("condition", "used", "rows"),
    [
        ("id = 123", (), ROWS),
        ("id = 123", ("stats",), ROW_GROUP_ROWS),
        ("id = 123", ("stats", "columnindex"), PAGE_ROWS),
        # Between the minimum and maximum name of each row group, and nowhere.
        ("name = 'name 55'", ("stats",), ROWS),
        ("name = 'name 55'", ("stats", "bloom"), 0),
    ],
)
def test_spark_filters_with_what_is_encrypted(
    spark: Spark, all_encrypted: Path, condition: str, used: tuple[str, ...], rows: int
) -> None:
    from engines.spark import KMS_OPTIONS

    switches = {f"parquet.filter.{name}.enabled": str(name in used).lower() for name in OTHER_FILTERS}
    frame = spark.session.read.options(**KMS_OPTIONS, **switches).parquet(str(all_encrypted)).filter(condition)
    assert [row["id"] for row in frame.collect()] == [row["id"] for row in EXPECTED if _meets(row, condition)]
    scan = frame._jdf.queryExecution().executedPlan().collectLeaves().head()
    assert scan.metrics().apply("numOutputRows").value() == rows


def _meets(row: dict[str, object], condition: str) -> bool:
    column, _, value = condition.partition(" = ")
    return str(row[column]) == value.strip("'")


def test_spark_splits_a_file_between_row_groups(spark: Spark, all_encrypted: Path) -> None:
    from engines.spark import KMS_OPTIONS

    name = "spark.sql.files.maxPartitionBytes"
    before = spark.session.conf.get(name)
    assert before is not None
    spark.session.conf.set(name, all_encrypted.stat().st_size // 8)
    try:
        frame = spark.session.read.options(**KMS_OPTIONS).parquet(str(all_encrypted))
        assert frame.rdd.getNumPartitions() > 1
        assert sorted(frame.toArrow().to_pylist(), key=lambda row: row["id"]) == EXPECTED
    finally:
        spark.session.conf.set(name, before)


def test_spark_reads_what_pyarrow_wrote_with_bloom_filters(spark: Spark, tmp_path: Path) -> None:
    path = tmp_path / "file.parquet"
    result = keytools(policies.COLUMN_KEYS).write_table(TABLE, path, **BLOOM_FILTERS)
    assert result.engine == "module encryptor"
    assert spark.read(EncryptedFile(MODULE_PATH, policies.COLUMN_KEYS, path)).to_pylist() == EXPECTED


def test_key_material_has_the_same_fields(spark: Spark, plain: Path, tmp_path: Path) -> None:
    theirs = spark.write(policies.EXTERNAL, tmp_path)
    ours = tmp_path / "ours.parquet"
    keytools(policies.EXTERNAL).encrypt_file(plain, ours)
    assert _material_shape(ours) == _material_shape(theirs)


def _material_shape(path: Path) -> dict[str, dict[str, object]]:
    materials = json.loads(path.with_name(f"_KEY_MATERIAL_FOR_{path.name}.json").read_text())
    random = ("wrappedDEK", "keyEncryptionKeyID", "wrappedKEK")
    fixed = {
        reference: {k: len(v) if k in random else v for k, v in json.loads(text).items()}
        for reference, text in materials.items()
    }
    return {reference: dict(sorted(fields.items())) for reference, fields in sorted(fixed.items())}


def test_spark_leaves_the_levels_of_v2_pages_in_plaintext(spark: Spark, tmp_path: Path) -> None:
    """The limit that the matrix names, shown in the file itself."""
    one_name_in_five_is_null = bytes.fromhex("de7befbdf7de7befbd")
    plain = _spark_writes(spark, tmp_path, "snappy", 2)
    theirs = spark.write(policies.V2_PAGES, tmp_path)
    ours = tmp_path / "ours.parquet"
    keytools(policies.V2_PAGES).encrypt_file(plain, ours)
    found = [one_name_in_five_is_null in path.read_bytes() for path in (plain, theirs, ours)]
    assert found == [True, True, False]
    with pytest.raises(DecryptionError, match="parquet-java leaves their levels in plaintext"):
        keytools(policies.V2_PAGES).decrypt_file(theirs, tmp_path / "decrypted.parquet")
