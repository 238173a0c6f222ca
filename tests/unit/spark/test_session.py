"""The configuration of a session; nothing here starts Java."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parquet_keytools.errors import ConfigurationError
from parquet_keytools.spark import build_jar, configure, configure_session, session, session_settings

SECRET = "canary-of-the-passphrase"
YAML = """
version: 1
kms: {type: keystore, path: keystore.json, passphrase: "${PASSPHRASE_OF_TEST}"}
tables:
  t: {footer_key: footer, column_keys: {pii: [a]}, unlisted_columns: plaintext,
      aad_prefix: "{table_name}/{file_name}"}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PASSPHRASE_OF_TEST", SECRET)
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    path = tmp_path / "c.yaml"
    path.write_text(YAML)
    return path


def hadoop(settings: dict[str, str]) -> dict[str, str]:
    return {name.removeprefix("spark.hadoop."): value for name, value in settings.items()}


def test_settings(file: Path) -> None:
    found = hadoop(session_settings(file, jar="/j.jar"))
    assert found["spark.jars"] == "/j.jar"
    assert found["parquet.crypto.factory.class"] == "parquet_keytools.KeytoolsCryptoFactory"
    assert found["parquet.encryption.kms.client.class"] == "parquet_keytools.PythonKmsClient"
    assert found["parquet.keytools.plaintext.reads"] == found["parquet.keytools.plaintext.writes"] == "reject"
    assert found["parquet.keytools.worker.python"] == sys.executable
    assert found["spark.sql.extensions"] == "parquet_keytools.SessionExtension"
    assert found["spark.sql.streaming.commitProtocolClass"] == "parquet_keytools.StreamCommitProtocol"
    carried = json.loads(base64.b64decode(found["parquet.keytools.configuration"]))
    assert carried["folder"] == str(file.parent)
    assert SECRET not in str(found) + str(carried)


def test_a_file_on_every_node(file: Path) -> None:
    found = hadoop(session_settings(file, jar="j", file_on_nodes="c.yaml"))
    assert json.loads(base64.b64decode(found["parquet.keytools.configuration"])) == {"load": "c.yaml"}


def test_plaintext_files_may_be_allowed_for_reading_only(file: Path) -> None:
    file.write_text(YAML + "reading: {plaintext_files: allow, cache_lifetime_seconds: 2}\n")
    found = hadoop(session_settings(file, jar="j"))
    assert found["parquet.keytools.plaintext.reads"] == "allow"
    assert found["parquet.keytools.plaintext.writes"] == "reject"
    assert found["parquet.encryption.cache.lifetime.seconds"] == "2"


def test_data_keys_alone_are_no_use_to_spark(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        f"{{version: 1, data_keys: {{k: {'A' * 22}==}}, "
        "tables: {t: {footer_key: k, unlisted_columns: footer_key}}}"
    )
    with pytest.raises(ConfigurationError, match="Spark does not support data keys"):
        session_settings(path, jar="j")


class Builder:
    """The part of a builder that `configure` needs."""

    def __init__(self, **options: str) -> None:
        self._options: dict[str, Any] = {name.replace("_", "."): value for name, value in options.items()}

    def config(self, name: str, value: str) -> Builder:
        self._options[name] = value
        return self


def test_configure_adds_to_what_is_there(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark import SparkContext

    # Another test of this process may have a session, or have left a JVM.
    for name in ("_active_spark_context", "_gateway", "_jvm"):
        monkeypatch.setattr(SparkContext, name, None)
    builder = Builder(
        spark_jars="/other.jar", spark_pyspark_python="/opt/python", spark_sql_extensions="org.example.Theirs"
    )
    builder.config("spark.sql.streaming.commitProtocolClass", "org.example.Protocol")
    assert configure(builder, file, jar="/ours.jar") is builder  # type: ignore[arg-type,comparison-overlap]
    assert builder._options["spark.jars"] == "/other.jar,/ours.jar"
    assert builder._options["spark.sql.extensions"] == "org.example.Theirs,parquet_keytools.SessionExtension"
    assert builder._options["spark.sql.streaming.commitProtocolClass"] == "org.example.Protocol"
    assert builder._options["spark.hadoop.parquet.keytools.worker.python"] == "/opt/python"


def test_configure_comes_before_spark(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark import SparkContext

    monkeypatch.setattr(SparkContext, "_active_spark_context", SimpleNamespace())
    with pytest.raises(ConfigurationError, match=r"is already running.*configure_session\(spark"):
        configure(Builder(), file, jar="j")  # type: ignore[arg-type]


class FakeSession:
    """The part of a running session that `configure_session` needs.

    Args:
        hadoop: Its Hadoop configuration.
        takes_jars: Whether its driver's class loader accepts jars.
        finds_class: Whether Hadoop finds our class, with the jar.
    """

    def __init__(
        self, hadoop: dict[str, str] | None = None, *, takes_jars: bool = True, finds_class: bool = True
    ) -> None:
        self.hadoop = {} if hadoop is None else hadoop
        self.jars: list[str] = []
        self.urls: list[str] = []
        self._finds_class = finds_class
        self._takes_jars = takes_jars
        self._jsc = self.sparkContext = self
        self._jsparkSession = object()
        self.checked: list[object] = []
        self._jvm = SimpleNamespace(
            parquet_keytools=SimpleNamespace(SessionExtension=SimpleNamespace(install=self.checked.append)),
            java=SimpleNamespace(
                lang=SimpleNamespace(
                    Thread=SimpleNamespace(
                        currentThread=lambda: SimpleNamespace(getContextClassLoader=lambda: self)
                    )
                ),
                io=SimpleNamespace(
                    File=lambda path: SimpleNamespace(toURI=lambda: SimpleNamespace(toURL=lambda: path))
                ),
            ),
        )
        self.settings = {
            "spark.pyspark.python": "/p",
            "spark.sql.streaming.commitProtocolClass": "org.apache.spark.ManifestFileCommitProtocol",
        }
        self.conf = SimpleNamespace(get=self.settings.get, set=self.settings.__setitem__)

    def hadoopConfiguration(self) -> Any:  # noqa: N802 - Spark's names
        found = object() if self._finds_class else None
        return SimpleNamespace(
            get=self.hadoop.get, set=self.hadoop.__setitem__, getClassByNameOrNull=lambda _: found
        )

    def addJar(self, jar: str) -> None:  # noqa: N802
        self.jars.append(jar)

    def loadClass(self, _: str) -> None:  # noqa: N802
        from py4j.protocol import Py4JError

        if not self.urls:
            raise Py4JError("ClassNotFoundException")

    def addURL(self, url: str) -> None:  # noqa: N802
        from py4j.protocol import Py4JError

        if not self._takes_jars:
            raise Py4JError("addURL does not exist")
        self.urls.append(url)


def as_session(fake: Any) -> Any:
    return fake


def test_a_session_that_runs_gets_all_settings_and_the_jar(file: Path) -> None:
    spark = FakeSession()
    assert configure_session(as_session(spark), file, jar="/ours.jar") is as_session(spark)
    expected = hadoop(session_settings(file, jar="/ours.jar", python="/p"))
    assert expected.pop("spark.jars") == "/ours.jar"
    # A running session accepts no extension.
    assert expected.pop("spark.sql.extensions") and spark.checked == [spark._jsparkSession]
    protocol = expected.pop("spark.sql.streaming.commitProtocolClass")
    assert spark.settings["spark.sql.streaming.commitProtocolClass"] == protocol
    assert spark.hadoop == expected
    assert spark.jars == spark.urls == ["/ours.jar"]
    configure_session(as_session(spark), file, jar="/ours.jar")
    assert spark.jars == ["/ours.jar"], "once is enough"


def test_a_session_that_takes_no_jar_stays_as_it_is(file: Path) -> None:
    spark = FakeSession(takes_jars=False)
    with pytest.raises(ConfigurationError, match=r"cannot load a jar.*--jars /ours.jar"):
        configure_session(as_session(spark), file, jar="/ours.jar")
    assert (spark.hadoop, spark.jars) == ({}, [])


def test_a_session_that_does_not_find_our_classes_stays_as_it_is(file: Path) -> None:
    spark = FakeSession(finds_class=False)
    with pytest.raises(ConfigurationError, match=r"does not find our Java classes.*--jars /ours.jar"):
        configure_session(as_session(spark), file, jar="/ours.jar")
    assert spark.hadoop == {}


def test_a_session_with_another_configuration_is_refused(file: Path) -> None:
    spark = FakeSession({"parquet.keytools.session.identity": "another"})
    with pytest.raises(ConfigurationError, match="is already running with another configuration"):
        configure_session(as_session(spark), file, jar="j")
    assert spark.hadoop == {"parquet.keytools.session.identity": "another"}


def connect_session(**settings: str) -> Any:
    """Return a session of Spark Connect; only a new session shows its server's settings."""
    of_server = SimpleNamespace(get=settings.get)
    seeming = SimpleNamespace(get=lambda name, default: "as the client said")
    return SimpleNamespace(conf=seeming, newSession=lambda: SimpleNamespace(conf=of_server))


def test_a_server_of_spark_connect_must_have_our_settings(file: Path) -> None:
    settings = session_settings(file, jar="j")
    configure_session(connect_session(**settings), file, jar="j")
    with pytest.raises(ConfigurationError, match=r"started without our settings.*session_settings"):
        configure_session(connect_session(), file, jar="j")
    settings["spark.hadoop.parquet.keytools.session.identity"] = "another"
    with pytest.raises(ConfigurationError, match="started with another configuration"):
        configure_session(connect_session(**settings), file, jar="j")


class BuilderOf(Builder):
    """Finds a session that exists already, and gives it no settings, as Spark's does."""

    def __init__(self, spark: Any, **options: str) -> None:
        super().__init__(**options)
        self.spark = spark

    def getOrCreate(self) -> Any:  # noqa: N802 - Spark's name
        return self.spark


def test_a_builder_configures_the_session_that_it_finds(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody started one between `configure` and `getOrCreate`."""
    from pyspark import SparkContext

    for name in ("_active_spark_context", "_gateway", "_jvm"):
        monkeypatch.setattr(SparkContext, name, None)
    spark = FakeSession()
    builder: Any = BuilderOf(spark)
    assert configure(builder, file, jar="/ours.jar").getOrCreate() is as_session(spark)
    assert spark.hadoop["parquet.crypto.factory.class"] == "parquet_keytools.KeytoolsCryptoFactory"
    builder = BuilderOf(FakeSession(takes_jars=False))
    with pytest.raises(ConfigurationError, match="cannot load a jar"):
        configure(builder, file, jar="/ours.jar").getOrCreate()


def test_a_client_of_spark_connect_gives_a_server_nothing_that_looks_like_ours(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark import SparkContext

    for name in ("_active_spark_context", "_gateway", "_jvm"):
        monkeypatch.setattr(SparkContext, name, None)
    builder: Any = BuilderOf(connect_session(), spark_remote="sc://somewhere")
    with pytest.raises(ConfigurationError, match="started without our settings"):
        configure(builder, file, jar="j").getOrCreate()
    assert builder._options == {"spark.remote": "sc://somewhere"}


# --- the jar ---


def test_no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"JAVA_HOME is set.*17 or newer; a JDK is not needed"):
        build_jar(tmp_path / "x.jar")


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho it does not compile\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ConfigurationError, match="it does not compile"):
        build_jar(tmp_path / "x.jar")
    assert not list(tmp_path.glob("*.jar"))


def test_a_cache_that_others_can_write_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = session.cache_folder()
    assert folder == tmp_path / "parquet-keytools"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    other = session.cache_folder()
    assert other != folder and other.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    folder.symlink_to(other)
    assert session.cache_folder() != folder


def test_the_sources_are_in_the_package() -> None:
    assert {path.stem for path in Path(session.__file__).parent.rglob("*.java")} >= {
        "PythonKmsClient",
        "KeytoolsCryptoFactory",
    }
