"""Sessions of Spark in which Parquet files are read and written with the keys of a configuration."""

from __future__ import annotations

import base64
import hashlib
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from parquet_keytools.config.loader import load_configuration
from parquet_keytools.config.settings import Configuration
from parquet_keytools.errors import ConfigurationError
from parquet_keytools.files.denied_columns import refuse_digests
from parquet_keytools.spark.bridge_jar import cached_jar
from parquet_keytools.spark.transport import carried, carried_file, configuration_identity, kms_for_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PLAINTEXT_FILES = {"parquet.keytools.plaintext.reads": "allow", "parquet.keytools.plaintext.writes": "allow"}
"""Options for a read, or a write, that is meant to be of plaintext files."""

TIMEOUT_SECONDS = 120

_FACTORY = "parquet_keytools.KeytoolsCryptoFactory"
_EXTENSIONS = "spark.sql.extensions"
_COMMIT_PROTOCOL = "spark.sql.streaming.commitProtocolClass"

FACTORY_OPTIONS = {
    "parquet.crypto.factory.class": _FACTORY,
    "parquet.encryption.kms.client.class": "parquet_keytools.PythonKmsClient",
}
"""What makes parquet-java ask us. Without these it ignores all other options, and writes plaintext in silence."""

KMS_INSTANCE = "parquet.encryption.kms.instance.id"
TABLE = "parquet.keytools.table"
"""The option of a read or a write that names the table of its files."""

AAD_PREFIX = "parquet.keytools.aad.prefix"
"""The option of a read that gives the AAD prefix of its files, `{file_name}` in it."""

_IDENTITY = "parquet.keytools.session.identity"
_HADOOP = "spark.hadoop."


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
    Where `getOrCreate` finds a session that somebody else started meanwhile, that one is configured
    (`configure_session`), or the call fails.

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

    if SparkContext._active_spark_context is not None or not hasattr(builder, "config"):
        raise ConfigurationError(
            "Spark is already running, and a builder cannot change it.",
            hint="Configure the running session: parquet_keytools.spark.configure_session(spark, ...).",
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
    for name, value in settings.items():
        other = given.get(name)
        if name in ("spark.jars", _EXTENSIONS) and other:
            builder = builder.config(name, f"{other},{value}")
        elif name != _COMMIT_PROTOCOL or not other:
            builder = builder.config(name, value)
    _check_what_it_makes(builder, settings)
    return builder


def configure_session(
    spark: SparkSession,
    configuration: Configuration | str | os.PathLike[str],
    *,
    file_on_nodes: str | None = None,
    python: str | None = None,
    jar: str | None = None,
    timeout_seconds: int = TIMEOUT_SECONDS,
) -> SparkSession:
    """Let a session that runs already, a notebook's for one, use the keys of a configuration.

    All sessions of its SparkContext do so from then on; data frames that were read before do not. With Spark
    Connect nothing can be set from here: then this checks that the server was started with `session_settings`.

    For the arguments, see `configure`.

    Returns:
        The same session.

    Raises:
        ConfigurationError: As with `configure`; or the session cannot be changed, and the text says how to start
            it; or it has another configuration already.
    """
    settings = session_settings(
        configuration,
        file_on_nodes=file_on_nodes,
        python=python or spark.conf.get("spark.pyspark.python", None),
        jar=jar,
        timeout_seconds=timeout_seconds,
    )
    _configure_running(spark, settings)
    return spark


def _check_what_it_makes(builder: SparkSession.Builder, settings: dict[str, str]) -> None:
    """Let a builder configure the session that it finds in place of making one, which Spark itself would not."""
    make = getattr(builder, "getOrCreate", None)
    if make is None:
        return

    def get_or_create() -> SparkSession:
        remote = str(builder._options.get("spark.remote", os.environ.get("SPARK_REMOTE", "")))
        if remote.startswith("sc://"):
            # A server that runs already takes none of them, and would seem to have them.
            for name in settings:
                builder._options.pop(name, None)
        spark: SparkSession = make()
        _configure_running(spark, settings)
        return spark

    # Of this one builder: each access to `SparkSession.builder` makes another.
    builder.getOrCreate = get_or_create  # type: ignore[method-assign]


def _configure_running(spark: SparkSession, settings: dict[str, str]) -> None:
    """Give settings to a running session that has none yet; refuse one that has others, or takes none."""
    jar = settings["spark.jars"]
    wanted = {name.removeprefix(_HADOOP): value for name, value in settings.items() if name.startswith(_HADOOP)}
    if not hasattr(spark, "_jsc"):
        _check_connect_server(spark, wanted[_IDENTITY])
        return
    context = spark.sparkContext
    hadoop = context._jsc.hadoopConfiguration()
    found = hadoop.get(_IDENTITY)
    if found is not None and found != wanted[_IDENTITY]:
        raise ConfigurationError(
            "Spark is already running with another configuration, and supports only one.",
            hint="Stop its session first, and start another one.",
        )
    if found is None:
        # First the jar: where that fails, the session stays as it is.
        if "://" not in jar:
            _add_to_running_jvm(context._jvm, jar)
        context._jsc.addJar(jar)
        # As parquet-java looks for it.
        if hadoop.getClassByNameOrNull(_FACTORY) is None:
            raise ConfigurationError(
                "the driver of Spark does not find our Java classes, or looked for them before they were there.",
                hint="Start Spark again, and configure the session before a read or write with our options; or "
                f"start it with --jars {jar}",
            )
        for name, value in wanted.items():
            hadoop.set(name, value)
    # Spark ignores an extension that it cannot load, and takes none for a session that runs.
    jvm: Any = context._jvm
    jvm.parquet_keytools.SessionExtension.install(spark._jsparkSession)
    if (spark.conf.get(_COMMIT_PROTOCOL, "") or "").endswith(".ManifestFileCommitProtocol"):
        spark.conf.set(_COMMIT_PROTOCOL, settings[_COMMIT_PROTOCOL])


def _check_connect_server(spark: SparkSession, identity_of_ours: str) -> None:
    """Refuse a session of Spark Connect whose server was started without our settings."""
    # Another session: what this one was given, its server shows as if it had been started with it.
    other = spark.newSession()
    found = other.conf.get(f"{_HADOOP}{_IDENTITY}", None)
    if found != identity_of_ours:
        what = "without our settings" if found is None else "with another configuration"
        raise ConfigurationError(
            f"the server of Spark Connect was started {what}, and a client cannot change that.",
            hint="Start it with what parquet_keytools.spark.session_settings returns, in its spark-defaults.conf.",
        )


def _add_to_running_jvm(jvm: Any, jar: str) -> None:
    """Give the jar to a JVM of the driver that runs already, by spark-submit or after an earlier session."""
    from py4j.protocol import Py4JError

    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    with suppress(Py4JError):
        loader.loadClass(_FACTORY)
        return
    with suppress(Py4JError):
        loader.addURL(jvm.java.io.File(jar).toURI().toURL())
        loader.loadClass(_FACTORY)
        return
    raise ConfigurationError(
        "the driver's JVM is already running and cannot load a jar.", hint=f"Start it with --jars {jar}"
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

    It contains no secret. For arguments and errors, see `configure`.
    """
    if not isinstance(configuration, Configuration):
        configuration = load_configuration(configuration)
    kms = kms_for_spark(configuration)
    refuse_digests_in_spark(configuration)
    text = carried(configuration) if file_on_nodes is None else carried_file(file_on_nodes)
    reading = configuration.reading
    properties = {
        **FACTORY_OPTIONS,
        KMS_INSTANCE: kms.instance_id,
        # Else parquet-java looks for one in the files.
        "parquet.encryption.kms.instance.url": "DEFAULT",
        "parquet.encryption.cache.lifetime.seconds": str(int(reading.cache_lifetime_seconds)),
        "parquet.encryption.key.access.token": cache_name(text, "reading", reading.cache_lifetime_seconds),
        "parquet.keytools.configuration": base64.b64encode(text.encode()).decode(),
        _IDENTITY: configuration_identity(configuration),
        "parquet.keytools.plaintext.reads": reading.plaintext_files,
        "parquet.keytools.plaintext.writes": "reject",
        "parquet.keytools.ctr.files": reading.ctr_files,
        "parquet.keytools.file.unique.lengths": reading.file_unique_lengths,
        "parquet.keytools.worker.python": python or os.environ.get("PYSPARK_PYTHON") or sys.executable,
        "parquet.keytools.worker.python.driver": sys.executable,
        "parquet.keytools.worker.timeout.seconds": str(timeout_seconds),
    }
    prefix = table_aad_prefix(configuration, None) if len(configuration.tables) == 1 else None
    if prefix is not None:
        # The text: ExpectedAadPrefix.java looks for it with NUL at its end, and without.
        properties[AAD_PREFIX] = prefix
    return {
        "spark.jars": jar or str(cached_jar()),
        _EXTENSIONS: "parquet_keytools.SessionExtension",
        _COMMIT_PROTOCOL: "parquet_keytools.StreamCommitProtocol",
        **{f"{_HADOOP}{name}": value for name, value in properties.items()},
    }


def refuse_digests_in_spark(configuration: Configuration) -> None:
    """Raise `ConfigurationError` where columns are to be shown as digests."""
    refuse_digests(
        configuration,
        "Spark's own reader cannot show digests in place of values.",
        "Read with Keytools, or have Spark read `parquet-keytools serve --s3`, which shows them.",
    )


def cache_name(*parts: object) -> str:
    """Return what parquet-java takes for an access token, and keeps its caches by.

    It is no secret. KEKs, and KMS clients, that must not be mixed up have to differ in it.
    """
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]


def table_aad_prefix(configuration: Configuration, table_name: str | None) -> str | None:
    """Return the AAD prefix that files of a table must have, `{file_name}` in it; None where it has none."""
    name, table = configuration.select_table(table_name)
    return table.rendered_aad_prefix(table_name=name, file_name="{file_name}")
