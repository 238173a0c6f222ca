"""Spark, whose Parquet reader and writer are parquet-java's, in one JVM for the whole run."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from py4j.protocol import Py4JJavaError

sys.path.append(str(Path(__file__).resolve().parents[2] / "services"))

from spark_jvm import TRUSTING_OPTIONS, remember_names

from engines.ours import base64_keys, deks_of
from engines.policy import EncryptedFile, Policy
from engines.sample import MASTER_KEYS, PAGE_ROWS, ROW_GROUP_ROWS, ROWS, column_keys, write_plain
from parquet_keytools.spark.session import cached_jar

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

JAVA_SOURCE = Path(__file__).with_name("InteropKeys.java")

KMS_OPTIONS = {
    "parquet.crypto.factory.class": "org.apache.parquet.crypto.keytools.PropertiesDrivenCryptoFactory",
    "parquet.encryption.kms.client.class": "InteropKeys$Kms",
    "interop.master.keys": ",".join(f"{name}:{key}" for name, key in base64_keys(MASTER_KEYS).items()),
}
"""The settings with which Spark reads and writes files with key material."""

LAYOUT_OPTIONS = {
    "parquet.block.row.count.limit": str(ROW_GROUP_ROWS),
    "parquet.page.row.count.limit": str(PAGE_ROWS),
    "parquet.page.write-checksum.enabled": "true",
}
"""Several row groups and pages, CRCs; the page index is always written."""

BLOOM_FILTER_OPTIONS = {
    "parquet.bloom.filter.enabled#name": "true",
    "parquet.bloom.filter.expected.ndv#name": "11",
    # A chunk with a dictionary for all its pages gets no Bloom filter.
    "parquet.enable.dictionary#name": "false",
}


@contextmanager
def spark_session(folder: Path) -> Iterator[SparkSession]:
    """Start a small Spark on this machine, with the classes of `InteropKeys.java`, and ours.

    Args:
        folder: For the compiled classes, and Spark's leftovers.
    """
    from pyspark.sql import SparkSession

    remember_names()
    classes = folder / "classes"
    classes.mkdir()
    settings = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        # Nothing else in its class path: it would not take the archive of classes.
        "spark.driver.extraJavaOptions": TRUSTING_OPTIONS,
        "spark.driver.memory": "512m",
        # As in services/spark_driver.py.
        "spark.sql.adaptive.enabled": "false",
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        "spark.local.dir": str(folder),
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "1",
        "spark.sql.warehouse.dir": str(folder),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    builder = SparkSession.builder.master("local[1]").appName("interop")
    for name, value in settings.items():
        builder = builder.config(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # That it does not know this pandas, which is not used.
        session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    _compile(session, classes)
    try:
        yield session
    finally:
        gateway = session.sparkContext._gateway
        session.stop()
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(30)


def _compile(session: SparkSession, classes: Path) -> None:
    """Compile with Janino, Spark's own compiler, so that no JDK is needed; and load the classes, and our jar."""
    compiler = session._jvm.org.codehaus.janino.SimpleCompiler()
    compiler.cook(JAVA_SOURCE.read_text())
    for name, code in dict(compiler.getBytecodes()).items():
        (classes / f"{name}.class").write_bytes(code)
    loader = session._jvm.java.lang.Thread.currentThread().getContextClassLoader()
    for path in (classes, cached_jar()):
        loader.addURL(session._jvm.java.io.File(str(path)).toURI().toURL())


def encryption_options(policy: Policy) -> dict[str, str]:
    """Return the properties that make Spark encrypt."""
    options = {
        "parquet.encryption.algorithm": policy.algorithm,
        "parquet.encryption.plaintext.footer": _java(policy.plaintext_footer),
        "parquet.encryption.double.wrapping": _java(policy.double_wrapping),
        "parquet.encryption.data.key.length.bits": str(policy.length_bits),
        "parquet.encryption.kek.length.bits": str(policy.length_bits),
        "parquet.encryption.key.material.store.internally": _java(policy.key_material == "internal"),
    }
    if not policy.column_keys:
        return KMS_OPTIONS | options | {"parquet.encryption.uniform.key": "footer"}
    return (
        KMS_OPTIONS
        | options
        | {
            "parquet.encryption.footer.key": "footer",
            "parquet.encryption.column.keys": ";".join(
                f"{k}:{','.join(v)}" for k, v in column_keys(policy).items()
            ),
            "parquet.encryption.complete.columns": _java(policy.unlisted_with_footer_key),
        }
    )


def decryption_options(file: EncryptedFile) -> dict[str, str]:
    """Return the properties that make Spark decrypt."""
    if not file.policy.data_keys:
        return KMS_OPTIONS
    deks = deks_of(file)
    options = {
        "parquet.crypto.factory.class": "InteropKeys$DataKeys",
        "interop.footer.key": _keys_text({"footer": deks.footer}),
        "interop.column.keys": _keys_text(deks.columns),
    }
    return options if deks.aad_prefix is None else options | {"interop.aad.prefix": deks.aad_prefix}


def _keys_text(keys: Mapping[str, bytes]) -> str:
    return ",".join(f"{name}:{key}" for name, key in base64_keys(keys).items())


def _java(value: bool) -> str:
    return str(value).lower()


class Spark:
    """Spark's own Parquet writer and reader."""

    def __init__(self, session: SparkSession) -> None:
        self.session = session

    def write(self, policy: Policy, folder: Path) -> Path:
        """Write the sample."""
        options = self.layout_options(policy) | encryption_options(policy)
        return self.write_frame(self.plain_frame(policy, folder), folder / "spark", options)

    def plain_frame(self, policy: Policy, folder: Path) -> DataFrame:
        """Return the sample, read from a plaintext file."""
        return self.session.read.parquet(str(write_plain(folder / "plain.parquet", policy)))

    @staticmethod
    def layout_options(policy: Policy) -> dict[str, str]:
        """Return the properties of the file layout, encrypted or not."""
        options = LAYOUT_OPTIONS | {"parquet.writer.version": f"PARQUET_{policy.data_page_version}_0"}
        return options | ({"parquet.page.row.count.limit": str(ROWS)} if policy.flat else BLOOM_FILTER_OPTIONS)

    @staticmethod
    def write_frame(frame: DataFrame, folder: Path, options: Mapping[str, Any]) -> Path:
        """Write a frame as one file, and return its path."""
        frame.coalesce(1).write.options(**options).parquet(str(folder))
        (path,) = folder.glob("part-*.parquet")
        return path

    def read(self, file: EncryptedFile) -> pa.Table:
        """Read a file."""
        return self.read_with(file.path, decryption_options(file))

    def read_with(self, path: Path, options: Mapping[str, str]) -> pa.Table:
        """Read a file with options, and with the CRCs of its pages checked."""
        options = {"parquet.page.verify-checksum.enabled": "true", **options}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", FutureWarning
                )  # That it does not know this pandas, which it checks.
                return self.session.read.options(**options).parquet(str(path)).toArrow()
        except Py4JJavaError as error:
            cause = error.java_exception
            while cause.getCause() is not None:
                cause = cause.getCause()
            raise RuntimeError(cause.toString()) from None
