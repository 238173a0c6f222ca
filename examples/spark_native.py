"""Use Spark's own Parquet writer and reader, with master keys in a keystore, in one JVM on this machine."""

import os
import secrets
import sys
import tempfile
import warnings
from pathlib import Path

from pyspark.sql import SparkSession

from parquet_keytools import Keytools
from parquet_keytools.kms.keystore_file import Keystore
from parquet_keytools.kms.passphrase import passphrase_from_file
from parquet_keytools.spark import configure

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    os.chdir(folder)  # Spark leaves a folder in its working directory.
    passphrase = folder / "passphrase"
    passphrase.touch(mode=0o600)
    passphrase.write_text(secrets.token_urlsafe(32))
    keystore = Keystore.create(folder / "keystore.json", lambda: passphrase_from_file(passphrase))
    for master_key_id in ("footer", "pii"):
        keystore.create_key(master_key_id)
    configuration = folder / "flights.yaml"
    configuration.write_text(
        """
        version: 1
        kms: {type: keystore, path: keystore.json, passphrase_file: passphrase}
        tables:
          flights: {footer_key: footer, column_keys: {pii: [tailnum]}, unlisted_columns: plaintext}
        """
    )

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # Spark's workers use this Python, not any python3.
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.local.dir", name).config("spark.driver.host", "127.0.0.1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Spark does not know this version of pandas.
        spark = configure(builder, configuration).getOrCreate()
    frame = spark.createDataFrame([(1545, "N14228"), (1714, "N24211")], ["flight", "tailnum"])

    # With the options of a table, Spark encrypts as the table says; without them the write fails.
    keytools = Keytools.from_yaml(configuration)
    options = keytools.spark_options("flights", frame.schema)
    frame.write.options(**options).parquet(str(folder / "flights"))

    # Reading needs no options; Keytools reads the same files.
    print(spark.read.parquet(str(folder / "flights")).filter("flight = 1714").collect())
    print(keytools.read_table(folder / "flights").num_rows, "rows")
    spark.stop()
