"""docs/recipes/iceberg-spark-vault.md: its blocks, its policy in a real OpenBao, and its client in a JVM."""

from __future__ import annotations

import os
import re
import sys
import zipfile
from pathlib import Path

import pytest
from iceberg_jvm import JavaError, iceberg_jvm
from openbao import OpenBao
from recipe_pages import blocks, run_blocks

from parquet_keytools.iceberg import IcebergKeyManagementClient

PAGE = "iceberg-spark-vault"
PREFIX = "spark.sql.catalog.lake."

pytestmark = [
    pytest.mark.usefixtures("java"),
    pytest.mark.skipif(os.environ.get("SPARK") == "no", reason="SPARK=no leaves the tests with Spark out"),
    pytest.mark.timeout(300),
]


def catalog_properties(folder: Path) -> dict[str, str]:
    """Return the properties that Spark passes to Iceberg's catalog."""
    settings = re.findall(r"^(\S+)\s+(\S+)$", (folder / "spark-defaults.conf").read_text(), re.M)
    return {name.removeprefix(PREFIX): value for name, value in settings if name.startswith(PREFIX)}


def test_spark_and_python_share_keys_under_the_policy_of_the_page(
    openbao: OpenBao, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    openbao.create_key("people")
    (policy,) = [text for language, text in blocks(PAGE) if language == "hcl"]
    reader = "".join(line for line in policy.splitlines(keepends=True) if "decrypt" in line)
    openbao.ask("PUT", "sys/policies/acl/recipe-spark", {"policy": policy})
    openbao.ask("PUT", "sys/policies/acl/recipe-spark-reader", {"policy": reader})
    variables = {"VAULT_ADDR": openbao.url, "VAULT_TOKEN": openbao.create_token("recipe-spark")}
    reader_token = openbao.create_token("recipe-spark-reader")
    run_blocks(PAGE, tmp_path, variables=variables)
    with zipfile.ZipFile(tmp_path / "parquet-keytools-spark.jar") as jar:
        assert "parquet_keytools/IcebergKeyManagementClient.class" in jar.namelist()
    properties = catalog_properties(tmp_path)
    assert properties["encryption.kms-impl"] == "parquet_keytools.IcebergKeyManagementClient"
    assert properties.pop("keytools.python") == "/opt/keytools/bin/python"
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    python = IcebergKeyManagementClient({"keytools.config": str(tmp_path / properties["keytools.config"])})
    key = os.urandom(16)
    # The JVM runs in this folder, like an executor beside the files that Spark sent it.
    with iceberg_jvm(tmp_path, READER_TOKEN=reader_token, **variables) as jvm:
        jvm.initialize(None, **properties | {"keytools.python": sys.executable})
        wrapped = jvm.wrap(key, "people")
        assert wrapped.startswith(b"vault:v1:")
        assert python.unwrap_key(wrapped, "people") == key
        openbao.rotate_key("people")
        assert jvm.unwrap(python.wrap_key(key, "people"), "people") == jvm.unwrap(wrapped, "people") == key
        with pytest.raises(JavaError, match="KeyAccessDenied"):
            jvm.wrap(key, "another")
        # A second JVM, which only reads, with its own token.
        (tmp_path / "reader.yaml").write_text(
            (tmp_path / "keytools.yaml").read_text().replace("${VAULT_TOKEN}", "${READER_TOKEN}")
        )
        jvm.initialize(tmp_path / "reader.yaml", **{"keytools.python": sys.executable})
        assert jvm.unwrap(wrapped, "people") == key
        with pytest.raises(JavaError, match="KeyAccessDenied"):
            jvm.wrap(key, "people")
