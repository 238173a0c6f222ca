"""A user's script that is type-checked and never run: every public method, as the documentation calls it."""

from pathlib import Path
from typing import BinaryIO

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from parquet_keytools import Keytools, KeytoolsError, load_configuration, parse_configuration
from parquet_keytools.errors import ConfigurationError

folder = Path("x")
keytools = Keytools.from_yaml("flights.yaml")
Keytools(load_configuration("flights.yaml"))
Keytools(parse_configuration({"version": 1}))
with Keytools.from_mapping({"version": 1}) as other:
    other.clear_caches()
other.close()
table: pa.Table = pa.table({"a": [1]})
properties: pq.FileEncryptionProperties = keytools.encryption_properties("t", table.schema, folder / "x.parquet")
pq.write_table(table, "x.parquet", encryption_properties=properties)
decryption: pq.FileDecryptionProperties = keytools.decryption_properties("x.parquet", columns=["a"])
read: pa.Table = pq.read_table("x.parquet", decryption_properties=decryption)
of_polars: pl.ParquetDecryptionProperties = keytools.polars_decryption("x.parquet", columns=["a"])
written = keytools.write_table(table, "x.parquet", compression="zstd")
keytools.write_table(
    pd.DataFrame({"a": [1]}), folder / "x.parquet", table_name="t", filesystem=pafs.LocalFileSystem()
)
text: str = f"{written.engine} {written.files} {written.rows} {written.size_bytes} {written.reasons}"
read = keytools.read_table("x.parquet", columns=["a"], filters=[("a", "=", 1)], pre_buffer=False)
read = keytools.read_table([folder / "a.parquet", "b.parquet"])
data: ds.Dataset = keytools.dataset(folder, partitioning="hive", read_dictionary=["a"])
read = data.to_table(columns=["a"], filter=ds.field("a") == 1)
keytools.write_dataset(table, folder, partitioning=["a"], existing_data_behavior="delete_matching")
schema: pa.Schema = keytools.schema(folder)
metadata: pq.FileMetaData = keytools.metadata("x.parquet")
rows: int = metadata.num_rows
encrypted = keytools.encrypt_file("a", "b", overwrite=False, on_progress=print)
size: int = encrypted.target_bytes
keytools.decrypt_file("a", "b", mode=0o640, skip_existing=True)
keytools.rekey_file("a", "b", new_table_name="t", new_keytools=other)
inspection = keytools.inspect_file("a", with_keys=False)
report = keytools.verify_file("a")
ok: bool = report.conforms
folder_report = keytools.verify_folder(folder, part_count=3, on_progress=lambda file: print(file.path))
ok = folder_report.conforms
salvaged = keytools.salvage_file("a", "b")
whole: bool = salvaged.is_whole
rotation = keytools.rotate(folder, moves={"a": "b"}, dry_run=True, on_file=lambda file: print(file.outcome.value))
ok = rotation.succeeded
for file in rotation.files:
    print(file.path, file.keys, file.error)
rekeyed = keytools.rekey_in_place(folder)
ok = keytools.encrypt_in_place(folder).succeeded
ok = keytools.erase_rows(folder, where="a = 1", dry_run=True).succeeded
erasure = keytools.erasure(folder, {"tenant": "acme"})
gone: list[bool] = [key.deletion.is_gone for key in erasure.states()]
created: list[bool] = [key.created for key in keytools.create_tenant_keys(["acme"], tags={"a": "b"})]
for uses in keytools.key_inventory(folder):
    print(uses.path, [use.master_key_id for use in uses.uses])
for path in keytools.files_using("pii", folder):
    print(path)
with keytools.writer("x.parquet", table.schema, table_name="t") as writer:
    writer.write_table(table)
filesystem = keytools.filesystem("t")
pd.DataFrame({"a": [1]}).to_parquet("x.parquet", filesystem=filesystem)
opened: BinaryIO = keytools.open("x.parquet")
view = keytools.view(folder)
frame = keytools.scan_polars(folder).select("a").collect()
wrapped_secret: str = keytools.wrap_hash_key("pseudonyms", "pii").wrapped_key
keytools.check_hash_keys()
facts = dict(keytools.summary())
reads: dict[str, str] = keytools.spark_read_options("t")
kms = keytools.kms
if kms is not None:
    print(kms.describe("pii").current_version)
try:
    keytools.read_table("x.parquet").to_pandas()
except ConfigurationError as error:
    print(error.hint)
except KeytoolsError as error:
    print(error)
