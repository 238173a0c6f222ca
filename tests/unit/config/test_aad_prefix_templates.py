"""AAD prefixes of tables: no NUL in them, and none is the beginning of another where that matters."""

from __future__ import annotations

import base64
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parquet_keytools import load_configuration, parse_configuration
from parquet_keytools.config.settings import prefixes_that_begin_another
from parquet_keytools.errors import ConfigurationError


def document(lengths: str = "any", **templates: str) -> dict[str, Any]:
    return {
        "version": 1,
        "kms": {"type": "in_memory", "keys": ["k"]},
        "tables": {
            name: {"footer_key": "k", "unlisted_columns": "footer_key", "aad_prefix": template}
            for name, template in templates.items()
        },
        "reading": {"file_unique_lengths": lengths},
    }


AMBIGUOUS = [
    # Two files of a table: part-1 and part-10.
    {"t": "{file_name}"},
    {"t": "t/{file_name}"},
    {"t": "t/{file_name}."},
    {"t": "t/{file_name}:{file_name}"},
    {"t": "{table_name}-{file_name}"},
    {"t": "t/{file_name}{{}}"},
    # Two tables.
    {"salary": "{table_name}", "salary_2019": "{table_name}"},
    {"a": "t", "b": "t/{file_name}/"},
    {"a": "t/x", "b": "t/{file_name}/"},
    {"a": "t/{file_name}/", "b": "t/{file_name}/{file_name}/"},
    {"a": "{table_name}/{file_name}/", "b": "a/x/y"},
    {"a": "t/x/", "b": "t/{file_name}/y"},
    # Bytes: `t`, and the first half of `é`.
    {"a": "base64:dA==", "b": "t/{file_name}/"},
    {"a": "base64:ww==", "b": "é/"},
]
UNAMBIGUOUS = [
    {"t": "t"},
    {"t": "{table_name}"},
    {"t": "{file_name}/"},
    {"t": "t/{file_name}/"},
    {"t": "t/{file_name}/of/{table_name}"},
    {"salary": "{table_name}/", "salary_2019": "{table_name}/"},
    {"a": "a/{file_name}/", "b": "b/{file_name}/"},
    {"a": "t/{file_name}/", "b": "t/{file_name}/"},
    {"a": "t/{file_name}/a", "b": "t/{file_name}/b"},
    {"a": "{file_name}/", "b": "/{file_name}/"},
    {"a": "base64:AHQ=", "b": "t/{file_name}/"},
    {"a": "base64:dAA=", "b": "t{file_name}/"},
]


@pytest.mark.parametrize("templates", AMBIGUOUS, ids=str)
def test_prefixes_that_begin_another_are_refused_where_lengths_vary(templates: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="may be the beginning of the prefix of") as caught:
        parse_configuration(document(**templates))
    assert "End it with `/`" in str(caught.value)
    assert caught.value.yaml_path in {f"tables.{name}.aad_prefix" for name in templates}
    # With a fixed length, no bytes can be moved.
    parse_configuration(document("exact", **templates))


@pytest.mark.parametrize("templates", UNAMBIGUOUS, ids=str)
def test_prefixes_that_end_are_accepted(templates: dict[str, str]) -> None:
    parse_configuration(document(**templates))


def test_the_error_names_line_and_path(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(json.dumps(document(t="t/{file_name}"), indent=1))
    line = 1 + path.read_text().splitlines().index('   "aad_prefix": "t/{file_name}"')
    with pytest.raises(ConfigurationError) as caught:
        load_configuration(path)
    assert (caught.value.line, caught.value.yaml_path) == (line, "tables.t.aad_prefix")
    assert "the prefix of another file" in str(caught.value)


def test_both_tables_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"tables\.salary\.aad_prefix.*of the table 'salary_2019'"):
        parse_configuration(document(salary="{table_name}", salary_2019="{table_name}"))


@pytest.mark.parametrize("lengths", ["exact", "any"])
def test_nul_is_refused(lengths: str) -> None:
    with pytest.raises(ConfigurationError, match="must not contain NUL") as caught:
        parse_configuration(document(lengths, t="t\0"))
    assert caught.value.yaml_path == "tables.t.aad_prefix"
    with pytest.raises(ConfigurationError, match="must not contain NUL, but the name of the table does"):
        parse_configuration(document(lengths, **{"t\0u": "{table_name}/"}))


def test_what_is_no_base64_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="not base64") as caught:
        parse_configuration(document(t="base64:{file_name}"))
    assert caught.value.yaml_path == "tables.t.aad_prefix"


def test_other_lengths_are_no_setting() -> None:
    with pytest.raises(ConfigurationError, match="'exact' or 'any'"):
        parse_configuration(document("short", t="t"))


templates = st.lists(st.sampled_from(["a", "b", "/", "{file_name}", "{table_name}"]), min_size=1, max_size=5).map(
    "".join
)


@given(st.dictionaries(st.sampled_from(["a", "ab"]), templates, min_size=1))
def test_no_renderings_begin_another_unnoticed(tables: dict[str, str]) -> None:
    found = set(prefixes_that_begin_another(tables))
    names = ["".join(name) for length in (1, 2, 3) for name in itertools.product("ab", repeat=length)]
    rendered = {
        table: [template.format(table_name=table, file_name=name) for name in names]
        for table, template in tables.items()
    }
    shown = {
        (one, other)
        for one, other in itertools.product(tables, repeat=2)
        if any(
            second != first and second.startswith(first)
            for first, second in itertools.product(rendered[one], rendered[other])
        )
    }
    assert shown <= found


@pytest.mark.parametrize("prefix", [b"\xff\x00\xfe", b"text", b"{file_name}", b"a{"])
def test_a_prefix_may_be_bytes(prefix: bytes) -> None:
    """Bytes are not a template, and are used unchanged."""
    given: Any = prefix
    text = f"base64:{base64.b64encode(prefix).decode()}"
    assert parse_configuration(document("exact", t=given)).tables["t"].aad_prefix == text
