"""Polars, whose Parquet reader and writer come from arrow-rs's; it takes DEKs and knows no KMS."""

from __future__ import annotations

import warnings
from pathlib import Path

import polars as pl
import pyarrow as pa

from engines.ours import DATA_KEYS, column_data_keys, deks_of
from engines.policy import AAD_PREFIX, EncryptedFile, Policy
from engines.sample import ROW_GROUP_ROWS, sample


class Polars:
    """`write_parquet` and `read_parquet` of Polars."""

    def write(self, policy: Policy, folder: Path) -> Path:
        """Write the sample."""
        path = folder / "file.parquet"
        encryption = pl.ParquetEncryptionProperties(
            footer_key=DATA_KEYS["footer"],
            column_keys=column_data_keys(policy) or None,
            plaintext_footer=policy.plaintext_footer,
            aad_prefix=None if policy.aad_prefix == "none" else AAD_PREFIX.encode(),
            store_aad_prefix=policy.aad_prefix == "stored",
        )
        frame = pl.DataFrame(sample(policy))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # That all this is unstable.
            frame.write_parquet(
                path,
                row_group_size=ROW_GROUP_ROWS,
                data_page_size=None if policy.flat else 1024,
                encryption=encryption,
            )
        return path

    def read(self, file: EncryptedFile) -> pa.Table:
        """Read a file with its DEKs."""
        deks = deks_of(file)
        decryption = pl.ParquetDecryptionProperties(
            footer_key=deks.footer,
            column_keys=deks.columns,
            aad_prefix=None if deks.aad_prefix is None else deks.aad_prefix.encode(),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return pl.read_parquet(file.path, decryption=decryption).to_arrow()
