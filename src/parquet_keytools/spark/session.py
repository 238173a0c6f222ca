"""Sessions of Spark in which Parquet files are read and written with the keys of a configuration."""

from __future__ import annotations

import atexit
import base64
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parquet_keytools.config.document import DocumentSource
from parquet_keytools.config.loader import load_configuration, portable_source, restore_configuration
from parquet_keytools.config.settings import Configuration
from parquet_keytools.errors import ConfigurationError, KmsError
from parquet_keytools.files.denied_columns import refuse_digests
from parquet_keytools.kms.client import KmsClient, KmsSettings, WrapRequest
from parquet_keytools.runtime.presentation import expanded, install_hint
from parquet_keytools.secret_bytes import SecretBytes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PLAINTEXT_FILES = {"parquet.keytools.plaintext.reads": "allow", "parquet.keytools.plaintext.writes": "allow"}
"""Options for a read, or a write, that is meant to be of plaintext files."""

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

_IDENTITY = "parquet.keytools.session.identity"
_HADOOP = "spark.hadoop."


def configure(
    builder: SparkSession.Builder,
    configuration: Configuration | str | os.PathLike[str],
    *,
    file_on_nodes: str | None = None,
    python: str | None = None,
    jar: str | None = None,
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
    )
    _configure_running(spark, settings)
    return spark


def _check_what_it_makes(builder: SparkSession.Builder, settings: dict[str, str]) -> None:
    """Let a builder configure a session that it finds instead of making one, which Spark itself would not do."""
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
    """Give settings to a running session without any; refuse one that has others, or cannot take them."""
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
    """Give the jar to a running JVM of the driver, by spark-submit or after an earlier session."""
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
        "parquet.keytools.worker.python": python or os.environ.get("PYSPARK_PYTHON") or sys.executable,
        "parquet.keytools.worker.python.driver": sys.executable,
    }
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
    """Return the access token of parquet-java, the key of its caches. It is no secret."""
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]


# --- a configuration in Spark's own, which anyone may read, so without secrets ---

# Workers expand environment variables, and only the path of a file with secrets travels.


def carried(configuration: Configuration) -> str:
    """Return a configuration as text, without secrets."""
    source = portable_source(configuration, "sent to Spark's executors")
    if source.redacted_paths:
        return carried_file(str(source.path))
    parts = {
        "file": source.file,
        "path": None if source.path is None else str(source.path),
        "folder": str(source.folder),
        "lines": [[list(path), line] for path, line in sorted(source.lines.items(), key=str)],
        "document": source.document,
    }
    return json.dumps(parts, sort_keys=True)


def carried_file(path: str) -> str:
    """Return text that makes a worker load a file: a path, or the name of one of Spark's files (`spark.files`)."""
    return json.dumps({"load": path})


def configuration_identity(configuration: Configuration) -> str:
    """Return a digest of the document without its secrets, the same wherever its file is."""
    document = None if configuration.source is None else configuration.source.document
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()[:32]


def received_configuration(text: str, files_folder: Path) -> Configuration:
    """Make a configuration from the text of `carried` or `carried_file`; Spark puts its files into a folder."""
    parts = json.loads(text)
    if "load" in parts:
        return load_configuration(files_folder / expanded(parts["load"]))
    return restore_configuration(
        DocumentSource(
            parts["file"],
            None if parts["path"] is None else Path(parts["path"]),
            Path(parts["folder"]),
            {tuple(path): line for path, line in parts["lines"]},
            parts["document"],
        )
    )


def kms_for_spark(configuration: Configuration) -> KmsSettings:
    """Return the settings of the KMS, without which Spark's own reader and writer cannot work."""
    if configuration.kms is None:
        raise ConfigurationError(
            "the configuration has no kms, and Spark does not support data keys.",
            hint="Read and write with Keytools, or with parquet-keytools spark.",
        )
    return configuration.kms


def refuse_generated_keys(kms: KmsClient | None) -> None:
    """Refuse a KMS client that generated its master keys: another process cannot make them again."""
    if getattr(kms, "has_generated_keys", False):
        raise ConfigurationError(
            "the in_memory KMS generates master keys, and every executor would have different ones.",
            hint="Write the keys into the configuration, or use a keystore.",
        )


def prove_keys(kms: KmsClient, master_key_ids: Iterable[str]) -> None:
    """Have the KMS wrap a random key with each master key; raise the `KmsError` of the first that it refuses."""
    for outcome in kms.wrap_many([WrapRequest(SecretBytes.random(128), name) for name in master_key_ids]):
        if isinstance(outcome, KmsError):
            raise outcome


# --- the jar with our Java classes: compiled by Janino, which ships with Spark, so that no JDK is needed ---


_SOURCES = Path(__file__).parent / "java"
# The package of all our classes: what else is compiled stands for classes of others, and stays out of the jar.
_PACKAGE = "parquet_keytools"
_COMPILER = "org.codehaus.commons.compiler.samples.CompilerDemo"
_COMPILER_JARS = ("janino-", "commons-compiler-")
# What the classes are compiled against: with other versions of these, they are compiled again.
_VERSIONS = (*_COMPILER_JARS, "parquet-hadoop-", "spark-core_", "hadoop-client-api-")
_COMPILER_SECONDS = 120


def build_jar(path: str | os.PathLike[str]) -> Path:
    """Compile our Java classes into a jar, for clusters whose administrator puts it in place.

    Args:
        path: Where; what is there is replaced.

    Raises:
        ConfigurationError: There is no Java or no Spark here, or the classes do not compile with this Spark.
    """
    target = Path(path)
    with tempfile.TemporaryDirectory(prefix="parquet-keytools-") as name:
        classes = Path(name)
        _compile(_spark_jars(), classes)
        # Made beside it, for this user alone, and moved: two sessions that start together both find a whole jar.
        handle, pending = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as jar:
                for file in sorted((classes / _PACKAGE).rglob("*.class")):
                    # With fixed times, the same classes give the same jar.
                    entry = zipfile.ZipInfo(file.relative_to(classes).as_posix())
                    jar.writestr(entry, file.read_bytes(), zipfile.ZIP_DEFLATED)
            Path(pending).replace(target)
        except BaseException:
            Path(pending).unlink()
            raise
    return target


def cached_jar() -> Path:
    """Return the jar for this Spark, compiled once and kept in the user's cache; errors as `build_jar`."""
    digest = hashlib.sha256()
    for source in _source_files():
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    for name in sorted(jar.name for jar in _spark_jars().glob("*.jar")):
        if name.startswith(_VERSIONS):
            digest.update(name.encode() + b"\0")
    jar = cache_folder() / f"parquet-keytools-spark-{digest.hexdigest()[:20]}.jar"
    return jar if jar.is_file() else build_jar(jar)


def _source_files() -> list[Path]:
    return sorted(_SOURCES.rglob("*.java"))


def cache_folder() -> Path:
    """Return a folder that only this user can write: what lies in it runs in every executor."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    with suppress(OSError, RuntimeError):  # There may be no home.
        root = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
        folder = root / "parquet-keytools"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_ours_alone(folder):
            return folder
    temporary = Path(tempfile.mkdtemp(prefix="parquet-keytools-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return temporary


def _is_ours_alone(folder: Path) -> bool:
    found = folder.lstat()
    if not hasattr(os, "getuid"):
        return os.access(folder, os.W_OK)
    others = stat.S_IWGRP | stat.S_IWOTH
    is_folder_of_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return is_folder_of_ours and not found.st_mode & others and os.access(folder, os.W_OK)


def _spark_jars() -> Path:
    """Return the folder of Spark's jars, below SPARK_HOME or in the package pyspark."""
    homes = [Path(os.environ["SPARK_HOME"])] if os.environ.get("SPARK_HOME") else []
    try:
        import pyspark
    except ImportError:
        pass
    else:
        homes.append(Path(pyspark.__file__).parent)
    for home in homes:
        if list((home / "jars").glob("janino-*.jar")):
            return home / "jars"
    raise ConfigurationError("there is no Spark here.", hint=f"{install_hint('spark')}, or set SPARK_HOME.")


def _java() -> str:
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=str(Path(home) / "bin") if home else None)
    if found is None:
        place = "JAVA_HOME is set, and there is no java in its folder bin." if home else "there is no java here."
        raise ConfigurationError(place, hint="Spark needs a Java runtime, 17 or newer; a JDK is not needed.")
    return found


def _compile(jars: Path, target: Path) -> None:
    everything = sorted(jars.glob("*.jar"))
    compiler = [jar for jar in everything if jar.name.startswith(_COMPILER_JARS)]
    # The JVM runs for a second.
    java = [_java(), "-XX:TieredStopAtLevel=1", "-cp", os.pathsep.join(map(str, compiler)), _COMPILER]
    options = ["-d", str(target), "-encoding", "UTF-8", "-g:lines,source"]
    command = [*java, *options, "-classpath", os.pathsep.join(map(str, everything)), *map(str, _source_files())]
    try:
        done = subprocess.run(  # noqa: S603 - Java and Spark of this user, and our own sources
            command, capture_output=True, text=True, errors="replace", timeout=_COMPILER_SECONDS, check=False
        )
        problem = (done.stdout + done.stderr).strip()
    except subprocess.TimeoutExpired:
        problem = f"it took more than {_COMPILER_SECONDS} seconds"
    # The compiler's exit status is 0 in any case.
    made = {path.stem for path in target.rglob("*.class")}
    if not made >= {path.stem for path in _source_files()}:
        raise ConfigurationError(
            f"our Java classes do not compile with the Spark in {jars.parent}: {problem[:2000]}.",
            hint="Spark 4 is supported.",
        )
