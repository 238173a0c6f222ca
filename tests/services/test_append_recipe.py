"""docs/recipes/append-without-decrypting.md: its blocks, with the page's policies in a real OpenBao."""

from __future__ import annotations

from pathlib import Path

from openbao import OpenBao
from recipe_pages import blocks, run_blocks

from parquet_keytools import Keytools

PAGE = "append-without-decrypting"


def test_a_writer_appends_and_reads_nothing(openbao: OpenBao, tmp_path: Path) -> None:
    for name in ("flights-footer", "flights-pii"):
        openbao.create_key(name)
    (writer,) = [text for language, text in blocks(PAGE) if language == "hcl"]
    openbao.ask("PUT", "sys/policies/acl/recipe-writer", {"policy": writer})
    assert "decrypt" not in writer
    reader = openbao.write_policy(
        {f"transit/decrypt/flights-{name}": ["update"] for name in ("footer", "pii")}, name="recipe-reader"
    )
    variables = {
        "VAULT_ADDR": openbao.url,
        "WRITER_TOKEN": openbao.create_token("recipe-writer"),
        "READER_TOKEN": openbao.create_token(reader),
        "VAULT_TOKEN": "",
    }
    run_blocks(PAGE, tmp_path, variables=variables)
    document = (tmp_path / "flights.yaml").read_text()
    for name in ("VAULT_ADDR", "VAULT_TOKEN"):
        value = variables["READER_TOKEN"] if name == "VAULT_TOKEN" else variables[name]
        document = document.replace(f"${{{name}}}", value)
    (tmp_path / "reader.yaml").write_text(document)
    (tmp_path / "reader.yaml").chmod(0o600)
    with Keytools.from_yaml(tmp_path / "reader.yaml") as keytools:
        assert keytools.read_table(tmp_path / "flights").num_rows == 4
    assert len(list((tmp_path / "flights").glob("*.parquet"))) == 2
