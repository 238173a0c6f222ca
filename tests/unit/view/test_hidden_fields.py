"""Readers who may not read every column see only fields that are known to reveal nothing about the others."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from unit.encryption.test_plaintext_footer import (
    CANARY,
    plain_bytes,
    plant_everywhere,
    source,
    with_footer,
)
from view_case import ViewCase, whole

from parquet_keytools import Keytools, SecretBytes
from parquet_keytools.format.structs import FileMetaData
from parquet_keytools.kms.contract_tests import wrap_one

FORMS = (CANARY, base64.b64encode(CANARY)[:-2], CANARY[:-4])
WITHHOLDING = ["error", "hide", "null", "hash"]


@pytest.fixture(params=[False, True], ids=["encrypted footer", "plaintext footer"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> ViewCase:
    made = ViewCase(
        tmp_path,
        {
            "column_keys": {"secret": ["secret"]},
            "unlisted_columns": "footer_key",
            "plaintext_footer": request.param,
        },
    )
    wrapped = wrap_one(made.kms, SecretBytes(os.urandom(32)), "public")
    made.more = {"hash_keys": {"h": {"master_key": "public", "wrapped_key": wrapped}}}
    made.table["hash_key"] = "h"
    return made


def planted(case: ViewCase) -> Path:
    """Return a file with planted values in each unknown field."""
    return case.encrypt(source(case.folder), "x.parquet")


def footer_of(data: bytes) -> FileMetaData:
    length = int.from_bytes(data[-8:-4], "little")
    return FileMetaData.read(data[-8 - length : -8])[0]


@pytest.mark.parametrize("denied_columns", WITHHOLDING)
def test_no_planted_value_is_in_a_view(case: ViewCase, denied_columns: str) -> None:
    path = planted(case)
    if denied_columns != "hash":
        case.kms.deny("secret")
    data = whole(case.view(path, denied_columns=denied_columns))
    assert [form for form in FORMS if form in data] == []
    footer = footer_of(data)
    for row_group in footer.row_groups:
        sorting = row_group.struct.fields.get(4)
        ordinals = [] if sorting is None else [element.fields[1][1] for element in sorting[1].elements]
        # Sorted by `open` and then by `secret`: the position of `open` alone may be shown.
        assert ordinals in ([], [0] if denied_columns == "hide" else [1])
        assert row_group.file_offset is None
        assert row_group.total_byte_size == sum(c.meta_data.total_uncompressed_size for c in row_group.columns)
        assert row_group.total_compressed_size in (
            None,
            sum(chunk.meta_data.total_compressed_size for chunk in row_group.columns),
        )


@pytest.mark.parametrize("denied_columns", ["hide", "null", "hash"])
def test_nor_in_what_readers_of_arrow_say(case: ViewCase, denied_columns: str) -> None:
    path = planted(case)
    if denied_columns != "hash":
        case.kms.deny("secret")
    keytools = case.keytools(denied_columns=denied_columns)
    said: dict[str, Callable[[Keytools], object]] = {
        "metadata": lambda tools: tools.metadata(path).to_dict() | {"more": tools.metadata(path).metadata},
        "schema": lambda tools: tools.schema(path).to_string(truncate_metadata=False),
        "table": lambda tools: tools.read_table(path).schema.to_string(truncate_metadata=False),
        "dataset": lambda tools: tools.dataset(path).schema.to_string(truncate_metadata=False),
        "view": lambda tools: ds.dataset(str(path), filesystem=tools.filesystem().arrow).schema.metadata,
    }
    for name, say in said.items():
        assert CANARY.decode() not in str(say(keytools)), name


def test_sizes_of_the_others_do_not_show_in_the_metadata(case: ViewCase) -> None:
    path = planted(case)
    case.kms.deny("secret")
    metadata = case.keytools(denied_columns="hide").metadata(path)
    for position in range(metadata.num_row_groups):
        row_group = metadata.row_group(position)
        assert row_group.total_byte_size == row_group.column(0).total_uncompressed_size


def test_unknown_fields_survive_for_readers_who_may_read_all(case: ViewCase) -> None:
    plain = with_footer(plain_bytes(), plant_everywhere)
    data = whole(case.view(case.encrypt(plain)))
    if not case.table["plaintext_footer"]:
        # Fields that a plaintext footer must not show are not in such a file at all.
        assert data.count(CANARY) == plain.count(CANARY)
    assert pq.read_table(pa.BufferReader(data)).num_rows == 100
