"""Sessions of Spark in which Parquet files are read and written with the keys of a configuration."""

from __future__ import annotations

import base64
import hashlib
import os
import sys
from typing import TYPE_CHECKING, Any

from parquet_keytools.config.loader import load_configuration
from parquet_keytools.config.settings import Configuration
from parquet_keytools.errors import ConfigurationError
from parquet_keytools.spark.bridge_jar import cached_jar
from parquet_keytools.spark.carried_configuration import carried, carried_file, identity

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PLAINTEXT_FILES = {"parquet.keytools.plaintext.reads": "allow", "parquet.keytools.plaintext.writes": "allow"}
"""Options for a read, or a write, that is meant to be of plaintext files."""

TIMEOUT_SECONDS = 120

_FACTORY = "parquet_keytools.KeytoolsCryptoFactory"


def configure(
    builder: SparkSession.Builder,
    configuration: Configuration | str | os.PathLike[str],
    *,
    file_on_nodes: str | None = None,
    python: str | None = None,
    jar: str | None = None,
    timeout_seconds: int = TIMEOUT_SECONDS,
) -> SparkSession.Builder:
    """Let a session of Spark use the keys of a configuration; call it last, before `getOrCreate`.

    Reading needs nothing else. A write needs the options of `Keytools.spark_options`, and fails without them.

    Args:
        builder: `SparkSession.builder`, with its other settings made.
        configuration: The configuration, or its YAML file.
        file_on_nodes: The YAML file on every node, or the name of one of Spark's files (`spark.files`), in
            place of `configuration`, which executors otherwise get without its secrets.
        python: The Python on every node that has parquet-keytools; if not given, that of `spark.pyspark.python`,
            of PYSPARK_PYTHON, or this one.
        jar: Path or URL of the jar with our Java classes, if it is in place already; it is made if not given.
        timeout_seconds: How long a request to the KMS may take.

    Raises:
        ConfigurationError: The configuration has mistakes, or holds secrets that must not be sent; Spark runs
            already; there is no Java.
    """
    from pyspark import SparkContext

    if SparkContext._active_spark_context is not None:
        raise ConfigurationError(
            "Spark runs already, and takes no jar any more.",
            hint="Stop its session first, or start Spark with what session_settings returns.",
        )
    given: dict[str, Any] = dict(getattr(builder, "_options", {}))
    settings = session_settings(
        configuration,
        file_on_nodes=file_on_nodes,
        python=python or given.get("spark.pyspark.python"),
        jar=jar,
        timeout_seconds=timeout_seconds,
    )
    if "PYSPARK_GATEWAY_PORT" in os.environ or SparkContext._gateway is not None:
        SparkContext._ensure_initialized()
        _add_to_running_jvm(SparkContext._jvm, settings["spark.jars"])
    if given.get("spark.jars"):
        settings["spark.jars"] = f"{given['spark.jars']},{settings['spark.jars']}"
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder


def _add_to_running_jvm(jvm: Any, jar: str) -> None:
    """Give the jar to a JVM of the driver that runs already, by spark-submit or after an earlier session.

    Raises:
        ConfigurationError: Its class loader takes no jar.
    """
    from py4j.protocol import Py4JError

    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    try:
        loader.loadClass(_FACTORY)
        return
    except Py4JError:
        pass
    try:
        loader.addURL(jvm.java.io.File(jar).toURI().toURL())
        loader.loadClass(_FACTORY)
    except Py4JError:
        unwilling = True
    else:
        unwilling = False
    if unwilling:
        raise ConfigurationError(
            "the driver's JVM runs already and takes no jar any more.", hint=f"Start it with --jars {jar}"
        )


def session_settings(
    configuration: Configuration | str | os.PathLike[str],
    *,
    file_on_nodes: str | None = None,
    python: str | None = None,
    jar: str | None = None,
    timeout_seconds: int = TIMEOUT_SECONDS,
) -> dict[str, str]:
    """Return what `configure` sets, for `spark-defaults.conf` or where else sessions are set up.

    There is no secret in it. Arguments and errors are those of `configure`.
    """
    if not isinstance(configuration, Configuration):
        configuration = load_configuration(configuration)
    if configuration.kms is None:
        raise ConfigurationError(
            "the configuration has no kms, and Spark takes no data keys.",
            hint="Read and write with Keytools, or with parquet-keytools spark.",
        )
    text = carried(configuration) if file_on_nodes is None else carried_file(file_on_nodes)
    reading = configuration.reading
    properties = {
        "parquet.crypto.factory.class": _FACTORY,
        "parquet.encryption.kms.client.class": "parquet_keytools.PythonKmsClient",
        "parquet.encryption.kms.instance.id": configuration.kms.instance_id,
        # Else parquet-java looks for one in the files.
        "parquet.encryption.kms.instance.url": "DEFAULT",
        "parquet.encryption.cache.lifetime.seconds": _whole_seconds(reading.cache_lifetime_seconds),
        "parquet.encryption.key.access.token": cache_name(text, "reading", reading.cache_lifetime_seconds),
        "parquet.keytools.configuration": base64.b64encode(text.encode()).decode(),
        "parquet.keytools.session.identity": identity(configuration),
        "parquet.keytools.plaintext.reads": reading.plaintext_files,
        "parquet.keytools.plaintext.writes": "reject",
        "parquet.keytools.ctr.files": reading.ctr_files,
        "parquet.keytools.worker.python": python or os.environ.get("PYSPARK_PYTHON") or sys.executable,
        "parquet.keytools.worker.python.driver": sys.executable,
        "parquet.keytools.worker.timeout.seconds": str(timeout_seconds),
    }
    prefix = _expected_aad_prefix(configuration)
    if prefix is not None:
        properties["parquet.keytools.aad.prefix"] = prefix
    return {"spark.jars": jar or str(cached_jar())} | {
        f"spark.hadoop.{name}": value for name, value in properties.items()
    }


def cache_name(*parts: object) -> str:
    """Return what parquet-java takes for an access token, and keeps its caches by.

    It is no secret. KEKs, and KMS clients, that must not be mixed up have to differ in it.
    """
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]


def _whole_seconds(seconds: float) -> str:
    return str(int(seconds))


def _expected_aad_prefix(configuration: Configuration) -> str | None:
    """Return the AAD prefix that files must have, `{file_name}` in it, where there is one table to tell it."""
    if len(configuration.tables) != 1:
        return None
    name, table = configuration.select_table()
    return table.rendered_aad_prefix(table_name=name, file_name="{file_name}")
