"""A chunk with more pages than there are page ordinals (spec 4.4.2): no reader accepts a wrapped ordinal.

The ordinal is a signed short. A writer that keeps counting gives the page after the last ordinal a negative one,
and eventually gives two pages the same AAD: then they can be exchanged.
"""

from __future__ import annotations

import base64
import io
import shutil
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from key_services import key_service
from soak import SOAK
from vector_kit.plain_file import PlainChunk, take_apart
from vector_kit.sealed_file import FOOTER_KEY, Hooks, Sealer
from vector_kit.vector import data_key, recipe

from parquet_keytools import Keytools
from parquet_keytools.conformance.report import Outcome
from parquet_keytools.encryption.aad import MAX_COUNT, MAX_ORDINAL
from parquet_keytools.errors import DecryptionError, FormatLimitError, ParquetFormatError
from parquet_keytools.files.conversion import FileResult
from parquet_keytools.format.structs import ColumnMetaData, OffsetIndex
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.view.chunk_view import PageCache
from parquet_keytools.view.plain_file import PlainFile, open_plain_file

WRAPPED = MAX_COUNT + 1
"""A number of pages: the ordinal of the last one is -32,768 in its AAD."""


class _SameBeginning(Sealer):
    """Seals files of one chunk that begin with the same pages: the longest file's pages are sealed only once."""

    def seal_pages(self, pages: int) -> bytes:
        """Return the file with this number of pages."""

        def cut_index(r: int, c: int, index: OffsetIndex) -> None:
            index.page_locations = index.page_locations[:pages]

        self.hooks = Hooks(
            metadata=lambda r, c, metadata: setattr(metadata, "num_values", pages),
            offset_index=cut_index,
            row_group=lambda r, row_group: setattr(row_group, "num_rows", pages),
            footer=lambda footer: setattr(footer, "num_rows", pages),
        )
        self._number = pages
        return self.seal()

    @cached_property
    def _longest(self) -> tuple[bytes, ColumnMetaData, list[tuple[int, int]]]:
        out = bytearray(b"PARE")
        ((plain,),) = self.plain.chunks
        metadata, places = super()._pages(out, 0, 0, plain)
        return bytes(out), metadata, places

    def _pages(
        self, out: bytearray, r: int, c: int, plain: PlainChunk
    ) -> tuple[ColumnMetaData, list[tuple[int, int]]]:
        data, metadata, places = self._longest
        places = places[: self._number]
        end = sum(places[-1])
        out += data[len(out) : end]
        metadata = metadata.shallow_copy()
        metadata.total_compressed_size = end - places[0][0]
        return metadata, places


class Pages:
    """Files of one column, with pages of one row each.

    Args:
        folder: Where they are.
        is_left_to_arrow: Whether Arrow decrypts them, which needs one key for footer and column; otherwise we do.
    """

    def __init__(self, folder: Path, *, is_left_to_arrow: bool) -> None:
        self._folder = folder
        self.is_left_to_arrow = is_left_to_arrow
        schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])
        sink = io.BytesIO()
        pq.write_table(
            pa.table({"id": pa.array(range(WRAPPED))}, schema=schema),
            sink,
            use_dictionary=False,
            data_page_size=1,
            write_batch_size=1,
            compression="none",
            write_page_index=True,
        )
        plain = take_apart(sink.getvalue())
        ((chunk,),) = plain.chunks
        assert len(chunk.pages) == WRAPPED
        # It has as many entries as there are pages.
        chunk.column_index = chunk.chunk.column_index_offset = chunk.chunk.column_index_length = None
        columns = {0: FOOTER_KEY if is_left_to_arrow else (data_key("k1"), b"k1")}
        # The kit packs ordinals like a writer that keeps counting.
        self._sealer = _SameBeginning(plain, recipe(7, columns=columns, aad_prefix=None))

    def file(self, pages: int) -> Path:
        """Return the file with this number of pages."""
        path = self._folder / f"{pages}.parquet"
        if not path.exists():
            path.write_bytes(self._sealer.seal_pages(pages))
        return path

    def keytools(self) -> Keytools:
        keys = {name: base64.b64encode(data_key(name)).decode() for name in ("kf", "k1")}
        column = {"unlisted_columns": "footer_key"} if self.is_left_to_arrow else {"column_keys": {"k1": ["id"]}}
        table = {"footer_key": "kf", "unlisted_columns": "plaintext", **column}
        return Keytools.from_mapping({"version": 1, "data_keys": keys, "tables": {"t": table}})


@pytest.fixture(scope="module", params=["by Arrow", "by us"] if SOAK else ["by us"])
def pages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pages:
    return Pages(tmp_path_factory.mktemp("pages"), is_left_to_arrow=request.param == "by Arrow")


def read_last_value(tools: Keytools, path: Path, _: Path) -> int:
    """Read only the last page, which the offset index names."""
    file = open_plain_file(key_service(tools), FileLocation.resolve(path), cache=PageCache())
    chunk = pq.read_metadata(pa.BufferReader(_shown(file))).row_group(0).column(0)
    end = chunk.data_page_offset + chunk.total_compressed_size
    return int.from_bytes(file.read_at(end - 8, 8), "little") + 1


def _shown(file: PlainFile) -> bytes:
    """Return a file that has only the footer of another one."""
    length = int.from_bytes(file.read_at(file.size_bytes - 8, 4), "little") + 8
    return b"PAR1" + file.read_at(file.size_bytes - length, length)


def rekeyed_in_place(tools: Keytools, path: Path, target: Path) -> int:
    shutil.copyfile(path, target)
    document = {"version": 1, "tables": {"t": {"footer_key": "new", "unlisted_columns": "footer_key"}}}
    new_tools = Keytools.from_mapping(document, kms=InMemoryKms({"new": None}))
    assert tools.rekey_in_place(target, new_keytools=new_tools).succeeded
    return int(new_tools.read_table(target).num_rows)


def rekeyed(tools: Keytools, path: Path, target: Path) -> int:
    tools.rekey_file(path, target)
    return int(tools.read_table(target).num_rows)


READERS: dict[str, Callable[[Keytools, Path, Path], int]] = {
    "read_table": lambda tools, path, _: tools.read_table(path).num_rows,
    "dataset": lambda tools, path, _: tools.dataset(path).to_table().num_rows,
    "view": lambda tools, path, _: pq.read_table(tools.open(path)).num_rows,
    "last page": read_last_value,
    "decrypt": lambda tools, path, target: _rows(tools.decrypt_file(path, target)),
    "salvage": lambda tools, path, target: _rows(tools.salvage_file(path, target)),
    "rekey": rekeyed,
    "rekey in place": rekeyed_in_place,
}


def _rows(result: FileResult) -> int:
    return int(pq.read_table(result.target).num_rows)


@pytest.mark.parametrize(
    "reader",
    # The first two read views, and the third walks over pages like the rest.
    READERS if SOAK else ["dataset", "last page", "rekey in place"],
)
def test_no_reader_takes_more_pages_than_there_are_ordinals(pages: Pages, reader: str, tmp_path: Path) -> None:
    target = tmp_path / "x.parquet"
    # Below the limit, `verify` walks over the longest chunk.
    if SOAK:
        assert READERS[reader](pages.keytools(), pages.file(MAX_COUNT), target) == MAX_COUNT
        target.unlink(missing_ok=True)
    with pytest.raises((FormatLimitError, ParquetFormatError, DecryptionError)) as refused:
        READERS[reader](pages.keytools(), pages.file(WRAPPED), target)
    if reader == "rekey in place":
        assert target.read_bytes() == pages.file(WRAPPED).read_bytes()
        target.unlink()
    # `salvage` has no complete row group, and Arrow has its own message.
    assert "more than 32768 pages" in str(refused.value) or reader in ("salvage", "read_table", "dataset")
    assert list(tmp_path.iterdir()) == []


def test_the_last_ordinal_is_one(pages: Pages) -> None:
    """The kit has a file with one more page, in which `verify` finds it."""
    report = pages.keytools().verify_file(pages.file(MAX_COUNT))
    assert {rule.rule.id for rule in report.rules if rule.outcome is Outcome.BROKEN} == {"no-prefix"}


def test_inspect_shows_no_page_after_the_last_ordinal(pages: Pages) -> None:
    (chunk,) = pages.keytools().inspect_file(pages.file(WRAPPED)).chunks
    ordinals = [module.page_ordinal for module in chunk.modules if module.page_ordinal is not None]
    assert max(ordinals) == MAX_ORDINAL
