"""`parquet-keytools spark`, as far as it works without Spark."""

from __future__ import annotations

import base64
import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_spark import FakeSpark
from typer.testing import CliRunner, Result

from parquet_keytools import Keytools
from parquet_keytools.cli import app, spark
from parquet_keytools.spark import session_settings

COMMANDS = {
    "encrypt": ["source", "target"],
    "decrypt": ["source", "target"],
    "rotate": ["path"],
    "rekey": ["path"],
    "verify": ["path"],
    "keys": ["path"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_without_java_it_says_what_to_install(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    result = CliRunner().invoke(app, ["spark", command, *COMMANDS[command], "--config", "none.yaml"])
    assert result.exit_code == 2
    assert "there is no Java" in result.stderr and "openjdk-17-jre-headless" in result.stderr


def test_without_pyspark_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    result = CliRunner().invoke(app, ["spark", "keys", "path", "--config", "none.yaml"])
    assert result.exit_code == 2
    assert "pip install 'pyspark>=4.0'" in result.stderr


def test_a_spark_that_does_not_start_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Builder:
        def __getattr__(self, name: str) -> Callable[..., Builder]:
            return lambda *_: self

        def getOrCreate(self) -> None:  # noqa: N802 - Spark's name
            raise RuntimeError("[JAVA_GATEWAY_EXITED] Java gateway process exited.\n  at java")

    pyspark_sql = SimpleNamespace(SparkSession=SimpleNamespace(builder=Builder()))
    monkeypatch.setitem(sys.modules, "pyspark.sql", pyspark_sql)
    monkeypatch.setattr(spark.shutil, "which", lambda *_, **__: "java")
    result = CliRunner().invoke(app, ["spark", "verify", "path", "--config", "c", "--master", "bogus"])
    assert result.exit_code == 2
    assert "Spark did not start: [JAVA_GATEWAY_EXITED]" in result.stderr and "at java" not in result.stderr


def test_settings_of_spark_have_a_form() -> None:
    result = CliRunner().invoke(app, ["spark", "keys", "path", "--config", "c", "--conf", "spark.executor.cores"])
    assert result.exit_code == 2
    assert "NAME=VALUE" in result.stderr


KEYS = {
    name: base64.b64encode(bytes([number]) * 32).decode() for number, name in enumerate(("footer", "pii", "new"))
}


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Calls a command with a configuration, the folder `plain`, and a fake session."""
    (tmp_path / "c.yaml").write_text(
        f"version: 1\nkms: {{type: in_memory, keys: {KEYS}}}\n"
        "tables: {t: {footer_key: footer, column_keys: {pii: [a]}, unlisted_columns: plaintext}}\n"
    )
    (tmp_path / "plain").mkdir()
    pq.write_table(pa.table({"a": [1, 2], "b": [3, 4]}), tmp_path / "plain" / "part-0.parquet")

    @contextlib.contextmanager
    def session(*_: object) -> Iterator[FakeSpark]:
        yield FakeSpark(1)

    monkeypatch.setattr(spark, "_session", session)
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, ["spark", *arguments, "--config", "c.yaml"])


def test_master_keys_are_moved(call: Callable[..., Result]) -> None:
    assert call("encrypt", "plain", "data").exit_code == 0
    result = call("rotate", "data", "--from", "pii", "--to", "new", "--new-keks", "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert document["outcomes"] == {"rotated": 1}
    assert [(key["master_key"], key["new_master_key"]) for key in document["files"][0]["keys"]] == [("pii", "new")]
    assert call("verify", "data").exit_code == 1  # The table still says pii.


def test_what_the_configuration_says_is_done_where_nothing_else_is_said(
    call: Callable[..., Result], tmp_path: Path
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(config.read_text() + "rotation: {moves: {pii: new}}\n")
    call("encrypt", "plain", "data")
    assert call("rotate", "data").exit_code == 0
    assert "new" in call("keys", "data").stdout


def test_verify_accepts_plaintext_and_counts_weaknesses(call: Callable[..., Result], tmp_path: Path) -> None:
    assert call("encrypt", "plain", "data").exit_code == 0
    weak = call("verify", "data", "--json")
    assert (weak.exit_code, json.loads(weak.stdout)["verdict"]) == (0, "conforms, with weaknesses")
    assert "conforms, with weaknesses" in call("verify", "data").stdout
    assert call("verify", "data", "--strict").exit_code == 0  # The table wants no AAD prefix.
    (tmp_path / "data" / "sub").mkdir()
    (tmp_path / "data" / "sub" / "p.parquet").write_bytes((tmp_path / "plain" / "part-0.parquet").read_bytes())
    (tmp_path / "data" / "people.csv").write_text("a,b\n1,2\n")
    assert call("verify", "data").exit_code == 1
    assert call("verify", "data", "--allow-plaintext", "sub/*").exit_code == 1
    accepted = call("verify", "data", "--allow-plaintext", "sub/*", "--allow-plaintext", "*.csv", "--json")
    assert (accepted.exit_code, json.loads(accepted.stdout)["verdict"]) == (0, "conforms, with weaknesses")
    config = tmp_path / "c.yaml"
    config.write_text(
        config.read_text().replace("{footer_key: footer,", "{footer_key: footer, plaintext_footer: true,")
    )
    assert call("encrypt", "plain", "visible").exit_code == 0
    assert call("verify", "visible").exit_code == 0
    assert call("verify", "visible", "--strict").exit_code == 1


def test_decrypt_takes_an_aad_prefix(call: Callable[..., Result], tmp_path: Path) -> None:
    assert call("encrypt", "plain", "data").exit_code == 0
    assert call("decrypt", "data", "back", "--aad-prefix", "other").exit_code == 1
    assert not list((tmp_path / "back").rglob("*.parquet"))
    assert call("decrypt", "data", "back").exit_code == 0
    assert pq.read_table(tmp_path / "back").equals(pq.read_table(tmp_path / "plain"))


def test_exit_status(call: Callable[..., Result], tmp_path: Path) -> None:
    assert call("encrypt", "plain", "data").exit_code == 0
    assert call("encrypt", "plain", "data").exit_code == 2
    assert call("verify", "data").exit_code == 0
    (tmp_path / "plain" / "zero.parquet").touch()
    failed = call("encrypt", "plain", "data", "--overwrite")
    assert failed.exit_code == 1 and "0 bytes are too few" in failed.stderr
    assert not (tmp_path / "data" / "_SUCCESS").exists()
    (tmp_path / "plain" / "zero.parquet").unlink()
    continued = call("encrypt", "plain", "data", "--skip-existing")
    assert continued.exit_code == 0 and "1 finished before" in continued.stdout
    assert (tmp_path / "data" / "_SUCCESS").exists()
    (tmp_path / "empty").mkdir()
    assert call("verify", "empty").exit_code == 1
    assert call("rotate", "data", "--from", "pii", "--to", "nowhere").exit_code == 3
    # A client made before is not used if the file has another secret now.
    config = tmp_path / "c.yaml"
    config.write_text(config.read_text().replace(KEYS["footer"], KEYS["new"]))
    assert call("rekey", "data").exit_code == 3


# --- settings ---


@pytest.fixture
def settings_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Calls `spark settings` with an existing jar, for two tables."""
    (tmp_path / "c.yaml").write_text(
        f"version: 1\nkms: {{type: in_memory, keys: {KEYS}}}\ntables:\n"
        '  t: {footer_key: footer, column_keys: {pii: ["it\'s"]}, unlisted_columns: footer_key}\n'
        "  u: {footer_key: footer, unlisted_columns: footer_key, aad_prefix: 'u/{file_name}'}\n"
    )
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(
        app, ["spark", "settings", "--config", "c.yaml", "--jar", "/ours.jar", *arguments]
    )


def test_settings_are_those_of_configure(settings_of: Callable[..., Result]) -> None:
    document = json.loads(settings_of("--json").stdout)
    expected = session_settings("c.yaml", jar="/ours.jar")
    assert document == {"settings": expected}
    text = settings_of().stdout
    conf, properties = text.split("\n# For spark-defaults.conf")
    words = shlex.split(conf.replace("\\\n", " "), comments=True)
    assert words[::2] == ["--conf"] * len(expected)
    assert dict(word.split("=", 1) for word in words[1::2]) == expected
    assert dict(line.split(" ", 1) for line in properties.splitlines()[1:]) == expected
    assert not [key for key in KEYS.values() if key in text], "keys stay in their file"


def test_options_of_a_table(settings_of: Callable[..., Result], tmp_path: Path) -> None:
    pq.write_table(pa.table({"it's": ["x"], "b": [[1]]}), tmp_path / "one.parquet")
    (tmp_path / "lake" / "part=1").mkdir(parents=True)
    (tmp_path / "one.parquet").rename(tmp_path / "lake" / "part=1" / "one.parquet")
    given = ("--table", "t", "--schema-from", "lake", "--partition-by", "part")
    document = json.loads(settings_of(*given, "--json").stdout)
    options = document["table_options"]
    assert options["parquet.keytools.table"] == "t"
    assert options["parquet.encryption.column.keys"] == "pii:it's"
    assert options["parquet.keytools.columns"] == "it%27s,b.list.element"
    result = settings_of(*given)
    assert result.exit_code == 0
    for clause in ("OPTIONS", "TBLPROPERTIES"):
        assert f"{clause} (\n  'parquet.encryption." in result.stdout
    assert r"'parquet.encryption.column.keys' = 'pii:it\'s'" in result.stdout
    # Encrypted files have a schema, too.
    Keytools.from_yaml("c.yaml").write_table(pa.table({"it's": ["x"]}), "encrypted.parquet", table_name="t")
    result = settings_of("--table", "t", "--schema-from", "encrypted.parquet", "--json")
    assert json.loads(result.stdout)["table_options"]["parquet.keytools.columns"] == "it%27s"


def test_a_table_without_columns_can_be_read(settings_of: Callable[..., Result]) -> None:
    document = json.loads(settings_of("--table", "u", "--json").stdout)
    assert document["read_options"]["parquet.keytools.table"] == "u"
    assert "table_options" not in document


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--schema-from", "x", "--ddl", "a INT"), "exclude each other"),
        (("--partition-by", "a"), "needs --schema-from or --ddl"),
        (("--table", "v"), "there is no table 'v'"),
        (("--table", "t", "--schema-from", "plain.parquet"), "matches no column"),
        (("--table", "u", "--schema-from", "plain.parquet"), "AAD prefix"),
        (("--table", "t", "--schema-from", "c.yaml"), "c.yaml"),
    ],
)
def test_settings_that_cannot_be(
    settings_of: Callable[..., Result], arguments: tuple[str, ...], text: str
) -> None:
    pq.write_table(pa.table({"b": [1]}), "plain.parquet")
    result = settings_of(*arguments)
    assert result.exit_code != 0 and result.stdout == ""
    assert text in " ".join(result.stderr.split())
