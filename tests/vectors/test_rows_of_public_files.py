"""A row removed from every readable public file: all other rows stay unchanged, or the file is refused."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from parquet_keytools import Keytools
from parquet_keytools.errors import KeytoolsError, OutputError
from parquet_keytools.kms.in_memory import InMemoryKms

REFUSED = {
    # dates in the year 290000 and in the year 4714 BC
    "int96_from_spark.parquet": "timestamps before 1678 or after 2261",
    # lists whose groups have other names
    "nonnullable.impala.parquet": "cannot write the schema",
    "nullable.impala.parquet": "cannot write the schema",
}


def choose(table: pa.Table) -> tuple[str, pa.ChunkedArray]:
    """Return a filter for the value in the middle of a column, and the rows that it matches."""
    for field in table.schema:
        values = table[field.name].drop_null()
        if (pa.types.is_integer(field.type) or pa.types.is_string(field.type)) and len(values):
            value = values[len(values) // 2]
            literal = str(value) if pa.types.is_integer(field.type) else "'" + str(value).replace("'", "''") + "'"
            return f'"{field.name}" = {literal}', pc.fill_null(pc.equal(table[field.name], value), False)
    name = table.schema.names[0]
    return f'"{name}" IS NULL', pc.is_null(table[name])


def test_every_public_file(tmp_path: Path, parquet_test_data: Path) -> None:
    settings = {"footer_key": "kf", "unlisted_columns": "footer_key"}
    kms = {"type": "in_memory", "keys": ["kf"]}
    document = {"version": 1, "kms": kms, "tables": {"t": settings}}
    tools = Keytools.from_mapping(document, kms=InMemoryKms({"kf": None}))
    rewritten, refused = 0, set()
    for source in sorted(parquet_test_data.glob("*.parquet")):
        path = tmp_path / source.name
        try:
            tools.encrypt_file(source, path)
            old = tools.read_table(path)
        except (KeytoolsError, pa.ArrowException, OSError):
            continue
        where, matches = choose(old)
        before, schema = path.read_bytes(), tools.metadata(path).schema
        try:
            tools.erase_rows(path, where=where)
        except OutputError as error:
            assert REFUSED[source.name] in str(error) and path.read_bytes() == before
            refused.add(source.name)
            continue
        new, expected = tools.read_table(path), old.filter(pc.invert(matches))
        assert new.schema.equals(old.schema, check_metadata=True) and tools.metadata(path).schema.equals(schema)
        # As text, in which NaN is equal to NaN.
        assert new.equals(expected) or str(new.to_pylist()) == str(expected.to_pylist()), source.name
        assert tools.verify_file(path).conforms
        rewritten += path.read_bytes() != before
    assert refused == REFUSED.keys() and rewritten >= 20
