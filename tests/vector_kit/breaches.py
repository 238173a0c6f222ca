"""For each rule, one file or folder that breaks only this rule."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from parquet_keytools.conformance.report import RULES
from parquet_keytools.format.structs import (
    Aes,
    BloomFilterHeader,
    EncryptionAlgorithm,
    EncryptionWithFooterKey,
    FileMetaData,
    KeyValue,
    PageHeader,
)
from parquet_keytools.format.thrift import Struct, WireType, read_struct
from vector_kit.good_files import external_recipe, kms_recipe
from vector_kit.plain_file import PlainPage, plain_bytes, summary_bytes, take_apart
from vector_kit.sealed_file import (
    BLOOM_FILTER_BITSET,
    BLOOM_FILTER_HEADER,
    COLUMN_INDEX,
    COLUMN_META_DATA,
    DATA_PAGE,
    DATA_PAGE_HEADER,
    DICTIONARY_PAGE,
    DICTIONARY_PAGE_HEADER,
    FOOTER,
    OFFSET_INDEX,
    Module,
    Place,
    Recipe,
)
from vector_kit.vector import SealedFile, Vector, base_columns, data_key, recipe

_ID, _NAME, _PRICE = range(3)

_TABLE = {
    "footer_key": "kf",
    "column_keys": {"k1": ["id"], "k2": ["name"]},
    "unlisted_columns": "footer_key",
}


def _at(place: Place, change: Callable[[Module], None]) -> Callable[[Module], None]:
    def hook(module: Module) -> None:
        if module.place == place:
            change(module)

    return hook


def _foreign(module: Module) -> None:
    """Give a module the AAD of another place."""
    module.aad = module.aad[:-1] + bytes([module.aad[-1] ^ 1])


def _metadata_left_behind(r: int, c: int) -> tuple[bytes, bool]:
    if (r, c) != (0, _ID):
        return b"", False
    return take_apart(plain_bytes()).chunks[r][c].metadata.serialise(), False


def _foreign_at(*place: int) -> Callable[[Module], None]:
    return _at(place, _foreign)


def _on(wanted: tuple[int, int], change: Callable[[Any], None]) -> Callable[[int, int, Any], None]:
    def hook(r: int, c: int, record: Any) -> None:
        if (r, c) == wanted:
            change(record)

    return hook


def _setting(**values: Any) -> Callable[[Any], None]:
    def change(record: Any) -> None:
        for name, value in values.items():
            setattr(record, name, value(getattr(record, name)) if callable(value) else value)

    return change


def _more(number: int) -> int:
    return number + 1


def _on_header(place: Place, change: Callable[[PageHeader], None]) -> Callable[[Place, PageHeader], None]:
    def hook(found: Place, header: PageHeader) -> None:
        if found == place:
            change(header)

    return hook


# --- Breaches that need more than a line -------------------------------------------------------------------


def _draft_2018(crypto: Any) -> None:
    crypto.struct.set_entry(2, (WireType.TRUE, None))
    crypto.struct.set_entry(4, (WireType.I64, 4))


def _draft_2019(footer: Any) -> None:
    footer.struct.set_entry(9, (WireType.TRUE, None))
    footer.struct.set_entry(10, (WireType.BINARY, b"kf"))


def _both_algorithms(crypto: Any) -> None:
    crypto.encryption_algorithm.aes_gcm_ctr_v1 = Aes()


def _ctr_for_gcm(crypto: Any) -> None:
    stored = crypto.encryption_algorithm
    stored.aes_gcm_ctr_v1, stored.aes_gcm_v1 = stored.aes_gcm_v1, None


def _second_algorithm(footer: Any) -> None:
    algorithm = EncryptionAlgorithm()
    algorithm.aes_gcm_v1 = Aes()
    footer.encryption_algorithm = algorithm


def _both_kinds(chunk: Any) -> None:
    chunk.crypto_metadata.encryption_with_footer_key = EncryptionWithFooterKey()


def _other_path(chunk: Any) -> None:
    chunk.crypto_metadata.encryption_with_column_key.path_in_schema = ["other"]


def _other_key_metadata(chunk: Any) -> None:
    # Deeper copies: the two row groups share nothing here.
    chunk.crypto_metadata.encryption_with_column_key.key_metadata = b"k2"


def _pandas(footer: FileMetaData) -> None:
    entry = KeyValue()
    entry.key, entry.value = (
        "pandas",
        '{"index_columns": [{"kind": "range", "start": 17, "stop": 4711, "step": 1}]}',
    )
    footer.key_value_metadata = [entry]


def _statistics(visible: Any) -> None:
    visible.struct.set_entry(12, (WireType.STRUCT, Struct({5: (WireType.BINARY, b"\x07" * 8)})))


def _dictionary_type(header: PageHeader) -> None:
    header.type = PageHeader.DICTIONARY_PAGE
    header.struct.set_entry(_DICTIONARY_HEADER, (WireType.STRUCT, Struct({1: (WireType.I32, 1)})))


def _index_page(r: int, c: int, pages: list[PlainPage]) -> list[PlainPage]:
    if (r, c) != (0, _ID):
        return pages
    header = PageHeader()
    header.type, header.uncompressed_page_size, header.compressed_page_size = PageHeader.INDEX_PAGE, 4, 4
    header.struct.set_entry(_INDEX_PAGE_HEADER, (WireType.STRUCT, Struct({})))
    return [pages[0], PlainPage(header, b"page"), *pages[1:]]


_INDEX_PAGE_HEADER = 6
"""Field of PageHeader."""


def _flip_crc(header: PageHeader) -> None:
    assert header.crc is not None
    header.crc ^= 1


def _shorter_column_index(module: Module) -> None:
    index, _ = read_struct(module.plaintext)
    index.fields[1][1].elements.pop()
    module.plaintext = index.as_bytes()


def _smaller_bitset(module: Module) -> None:
    header, _ = BloomFilterHeader.read(module.plaintext)
    header.num_bytes -= 1
    module.plaintext = header.serialise()


def _counter_from_2(module: Module) -> None:
    module.counter = b"\0\0\0\2"


def _longer_offset_index(place: Place, sealed: bytes) -> bytes:
    if place != (OFFSET_INDEX, 0, _ID):
        return sealed
    return struct.pack("<I", len(sealed) - 3) + sealed[4:]


def _many_pages(r: int, c: int, pages: list[PlainPage]) -> list[PlainPage]:
    if (r, c) != (0, _ID):
        return pages
    return [PlainPage(pages[0].header, b"")] * 32_769


def _empty_page(place: Place, header: PageHeader) -> None:
    if place[:3] == (DATA_PAGE, 0, _ID):
        header.uncompressed_page_size = 0


def _same_nonce() -> Callable[[Module], None]:
    nonces: dict[Place, bytes] = {}

    def hook(module: Module) -> None:
        nonces[module.place] = module.nonce
        if module.place == (DATA_PAGE, 0, _ID, 1):
            module.nonce = nonces[DATA_PAGE, 0, _ID, 0]

    return hook


def _levels_outside(seed: int) -> Recipe:
    """Return a recipe for V2 pages whose levels precede the module, as parquet-java writes them."""
    lengths: dict[tuple[int, int], list[int]] = {}
    levels: dict[Place, bytes] = {}

    def pages(r: int, c: int, found: list[PlainPage]) -> list[PlainPage]:
        headers = [page.header.struct.entry(_HEADER_V2) for page in found]
        lengths[r, c] = [entry[1].fields[_DEFINITION_LEVELS][1] for entry in headers if entry is not None]
        return found

    def module(module: Module) -> None:
        if module.place[0] == DATA_PAGE and module.place[2] == _PRICE:
            _, r, c, ordinal = module.place
            length = lengths[r, c][ordinal]
            levels[module.place], module.plaintext = module.plaintext[:length], module.plaintext[length:]

    def sealed(place: Place, data: bytes) -> bytes:
        return levels.get(place, b"") + data

    return recipe(seed, pages=pages, module=module, sealed=sealed)


_DICTIONARY_HEADER, _HEADER_V2 = 7, 8
"""Fields of a page header: the headers of a dictionary page, and of a data page V2."""

_DEFINITION_LEVELS = 5
"""Field of DataPageHeaderV2: the number of bytes of definition levels at the beginning of a page."""


def _external_without_file(seed: int) -> Recipe:
    return external_recipe(seed)[0]


def _plaintext(**hooks: Any) -> dict[str, Any]:
    return {"plaintext_footer": True, **hooks}


def _parameters(**values: Any) -> Callable[[Any], None]:
    return lambda crypto: _setting(**values)(crypto.encryption_algorithm.aes_gcm_v1)


# --- Files -------------------------------------------------------------------------------------------------

_FILES: dict[str, Any] = {
    "magic": {"file": lambda data: b"PARX" + data[4:]},
    "footer-length": {"file": lambda data: data[:-8] + struct.pack("<I", 2**31) + data[-4:]},
    "footer-thrift": {"footer_block": lambda block: b"\xff" + block[1:]},
    "draft-2018": {"crypto": _draft_2018},
    "draft-2019": _plaintext(footer=_draft_2019),
    "algorithm": {"crypto": _both_algorithms},
    "file-unique": {
        "crypto": lambda crypto: _setting(aad_file_unique=None)(crypto.encryption_algorithm.aes_gcm_v1)
    },
    "prefix-flag": {
        "crypto": lambda crypto: _setting(supply_aad_prefix=True)(crypto.encryption_algorithm.aes_gcm_v1)
    },
    "prefix-expected": {},
    "key-material": {"footer_key_metadata": b'{"keyMaterialType":"PKMT1","internalStorage":true}'},
    "file-unique-length": {"file_unique_length": 9},
    "no-prefix": {"aad_prefix": None},
    "ctr": {"is_ctr": True},
    "crypto-fields": {"crypto": lambda crypto: crypto.struct.set_entry(7, (WireType.BINARY, b"anyone's"))},
    "footer-framing": {"footer_block": lambda block: block + bytes(4)},
    "footer-authentic": {"module": _foreign_at(FOOTER)},
    "signature-present": _plaintext(footer_block=lambda block: block[:-28]),
    "signature-valid": _plaintext(footer_block=lambda block: block.replace(b"parquet-cpp", b"parquet-cpq")),
    "algorithm-place": {"footer": _second_algorithm},
    "algorithm-stated": _plaintext(footer=_setting(encryption_algorithm=None)),
    "schema": {"row_group": lambda r, group: _setting(columns=lambda columns: columns[: 3 - r])(group)},
    "row-group-ordinal": {"row_group": lambda r, group: _setting(ordinal=7 * r)(group)},
    "row-group-ordinal-set": {"row_group": lambda r, group: _setting(ordinal=None)(group)},
    "row-count": {"footer": _setting(num_rows=_more)},
    "ordinal-limit": {"pages": _many_pages, "page_header": _empty_page},
    "crypto-metadata": {"chunk": _on((0, _ID), _both_kinds)},
    "crypto-metadata-path": {"chunk": lambda r, c, chunk: _other_path(chunk) if c == _ID else None},
    "crypto-metadata-same": {"chunk": _on((1, _ID), _other_key_metadata)},
    "crypto-metadata-set": {"chunk": _on((1, _ID), _setting(crypto_metadata=None))},
    "metadata-hidden": {"chunk": lambda r, c, chunk: None},
    "metadata-in-place": {"chunk": _on((0, _PRICE), _setting(encrypted_column_metadata=bytes(40)))},
    "metadata-visible": _plaintext(chunk=_on((0, _ID), _setting(meta_data=None))),
    "metadata-encrypted": _plaintext(chunk=_on((0, _ID), _setting(encrypted_column_metadata=None))),
    "metadata-stripped": _plaintext(visible=_on((0, _ID), _statistics)),
    "columns-encrypted": {"columns": {}},
    "names-visible": _plaintext(),
    "footer-values": _plaintext(footer=_pandas),
    "field-types": {"footer": lambda footer: footer.struct.set_entry(6, (WireType.I64, 1))},
    "padding": {"padding": lambda plaintext: plaintext + bytes(3)},
    "column-metadata-authentic": {"module": _foreign_at(COLUMN_META_DATA, 0, _ID)},
    "data-page-authentic": {"module": _foreign_at(DATA_PAGE, 0, _ID, 1)},
    "dictionary-page-authentic": {"module": _foreign_at(DICTIONARY_PAGE, 0, _NAME)},
    "data-page-header-authentic": {"module": _foreign_at(DATA_PAGE_HEADER, 0, _ID, 1)},
    "dictionary-page-header-authentic": {"module": _foreign_at(DICTIONARY_PAGE_HEADER, 0, _NAME)},
    "column-index-authentic": {"module": _foreign_at(COLUMN_INDEX, 0, _ID)},
    "offset-index-authentic": {"module": _foreign_at(OFFSET_INDEX, 0, _ID)},
    "bloom-filter-header-authentic": {"module": _foreign_at(BLOOM_FILTER_HEADER, 0, _NAME)},
    "bloom-filter-bitset-authentic": {"module": _foreign_at(BLOOM_FILTER_BITSET, 0, _NAME)},
    "metadata-leaked": {"chunk_tail": _metadata_left_behind},
    "metadata-path": {"metadata": _on((0, _ID), _setting(path_in_schema=["other"]))},
    "metadata-agrees": _plaintext(visible=_on((0, _ID), _setting(num_values=_more))),
    "layout-range": {"chunk": _on((0, _ID), _setting(column_index_offset=10**9))},
    "layout-overlap": {"chunk": _on((0, _ID), _setting(offset_index_offset=lambda offset: offset - 4))},
    "layout-gap": {"chunk_tail": lambda r, c: (b"anyone's" if (r, c) == (0, _ID) else b"", False)},
    "module-length": {"sealed": _longer_offset_index},
    "page-header": {"module": _at((DATA_PAGE_HEADER, 0, _ID, 1), lambda m: setattr(m, "plaintext", b"\xff"))},
    "page-type": {"page_header": _on_header((DATA_PAGE, 0, _ID, 1), _dictionary_type)},
    "dictionary-offset": {
        "metadata": _on((0, _ID), lambda m: setattr(m, "dictionary_page_offset", m.data_page_offset))
    },
    "data-page-offset": {"metadata": _on((0, _NAME), _setting(data_page_offset=_more))},
    "chunk-size": {"chunk_tail": lambda r, c: (bytes(5) if (r, c) == (0, _ID) else b"", True)},
    "page-size": {"page_header": _on_header((DATA_PAGE, 0, _ID, 1), _setting(uncompressed_page_size=_more))},
    "value-count": {"metadata": _on((0, _ID), _setting(num_values=_more))},
    "offset-index": {
        "offset_index": _on((0, _ID), lambda index: _setting(compressed_page_size=_more)(index.page_locations[1]))
    },
    "offset-index-rows": {
        "offset_index": _on((0, _ID), lambda index: _setting(first_row_index=1000)(index.page_locations[1]))
    },
    "column-index": {"module": _at((COLUMN_INDEX, 0, _ID), _shorter_column_index)},
    "bloom-filter": {"module": _at((BLOOM_FILTER_HEADER, 0, _NAME), _smaller_bitset)},
    "row-group-offset": {"row_group": lambda r, group: _setting(file_offset=_more)(group)},
    "row-group-size": {"row_group": lambda r, group: _setting(total_compressed_size=_more)(group)},
    "invocations": {},
    "wanted-columns": {},
    "wanted-encryption": {"columns": {_NAME: base_columns()[_NAME], _PRICE: base_columns()[_PRICE]}},
    "wanted-keys": {},
    "dek-distinct": {"columns": {**base_columns(), _ID: (data_key("kf"), b"kf")}},
    "wanted-prefix": {},
    "wanted-algorithm": {"is_ctr": True},
    "wanted-footer": _plaintext(),
}
"""Rule -> changes to the usual recipe."""

_EXPECTED: dict[str, dict[str, Any]] = {
    "prefix-expected": {"aad_prefix": "another table"},
    "invocations": {"invocation_limit": 10},
    "wanted-columns": {"table": {**_TABLE, "column_keys": {"k1": ["id", "absent"], "k2": ["name"]}}},
    "wanted-encryption": {"table": _TABLE},
    "wanted-keys": {"table": {**_TABLE, "column_keys": {"k1": ["id", "name"]}}},
    "wanted-key-length": {
        "table": {
            "footer_key": "footer",
            "column_keys": {"column": ["id"]},
            "unlisted_columns": "footer_key",
            "data_key_length_bits": 256,
        }
    },
    "wanted-prefix": {"table": {**_TABLE, "aad_prefix": "kit", "store_aad_prefix": False}},
    "wanted-algorithm": {"table": _TABLE},
    "wanted-footer": {"table": _TABLE},
}

_ALSO = {
    "wanted-algorithm": {"ctr"},
    "algorithm-of-pages": {"ctr"},
    "page-content": {"ctr"},
    "metadata-leaked": {"layout-gap"},
}


def _file_recipes(seed: int) -> Iterator[tuple[str, Recipe, dict[str, Any]]]:
    """Yield rule, recipe and the required features of the plaintext file."""
    for rule_id, changes in _FILES.items():
        seed += 1
        made = recipe(seed, **changes)
        if rule_id == "metadata-hidden":
            made = _with_visible_metadata(seed)
        yield rule_id, made, {}
    yield "nonce-reuse", recipe(seed + 1, module=_same_nonce()), {}
    crc = _on_header((DATA_PAGE, 0, _ID, 1), _flip_crc)
    yield "page-crc", recipe(seed + 2, page_header=crc), {"crc": True}
    yield "page-v2-whole", _levels_outside(seed + 3), {"v2": True}
    yield "algorithm-of-pages", recipe(seed + 4, crypto=_ctr_for_gcm), {"compression": "snappy"}
    yield "key-material-kind", kms_recipe(seed + 5, footer={"isFooterKey": False}), {}
    yield "key-material-file", _external_without_file(seed + 7), {}
    yield "key-wrap", kms_recipe(seed + 9, column={"wrong_kek": True}), {}
    yield "kms-named", kms_recipe(seed + 11, footer={"kmsInstanceURL": "https://kms.example"}), {}
    yield "wanted-key-length", kms_recipe(seed + 15, dek_length_bits=128), {}
    yield "page-content", recipe(seed + 17, is_ctr=True, module=_counter_from_2), {"compression": "zstd"}
    yield "kek-length", kms_recipe(seed + 13, column={"kek_length_bits": 128}), {}


def _with_visible_metadata(seed: int) -> Recipe:
    kept: dict[tuple[int, int], Any] = {}

    def metadata(r: int, c: int, record: Any) -> None:
        kept[r, c] = record

    def chunk(r: int, c: int, record: Any) -> None:
        if (r, c) == (0, _ID):
            record.meta_data = kept[r, c]

    return recipe(seed, metadata=metadata, chunk=chunk)


def breaking_vectors() -> Iterator[Vector]:
    """Yield a vector for each rule, in the order of the rules; `file-list` needs a list, which no vector has."""
    vectors = {vector.rule: vector for vector in (*_file_vectors(), *_folder_vectors())}
    for rule in RULES:
        if rule.id != "file-list":
            yield vectors[rule.id]


def _file_vectors() -> Iterator[Vector]:
    for rule_id, made, plain in _file_recipes(1000):
        also = set(_ALSO.get(rule_id, set()))
        if made.plaintext_footer and rule_id not in ("draft-2019", "algorithm-stated"):
            also.add("names-visible")
        name = f"{rule_id}.parquet"
        yield Vector(
            f"broken/{name}",
            _title(rule_id),
            {name: SealedFile(made, plain)},
            frozenset({rule_id} | also),
            rule_id,
            _EXPECTED.get(rule_id, {}),
        )
    plain = {"encrypted.parquet": plain_bytes()}
    yield Vector("broken/encrypted.parquet", _title("encrypted"), plain, frozenset({"encrypted"}), "encrypted")


def _folder_vectors() -> Iterator[Vector]:
    def part(number: int, seed: int, prefix: str | None = None, **plain: Any) -> SealedFile:
        text = prefix or f"kit.part{number}"
        return SealedFile(recipe(seed, f".{number}", aad_prefix=text.encode()), plain)

    def folder(rule_id: str, files: dict[str, SealedFile | bytes], *also: str, **expected: Any) -> Vector:
        broken = frozenset({rule_id, *also})
        return Vector(f"broken/{rule_id}", _title(rule_id), files, broken, rule_id, expected, is_folder=True)

    two = {"a.parquet": part(0, 2001), "b.parquet": part(1, 2002)}
    yield folder("folder-name", {"id=7/a.parquet": part(0, 2017)})
    yield folder("part-missing", {**two}, parts=3)
    yield folder("part-doubled", {**two, "c.parquet": part(2, 2003, "copy.part1")}, parts=2)
    yield folder("file-copied", {"a.parquet": part(0, 2004), "b.parquet": part(1, 2004)})
    yield folder("prefix-shared", {"a.parquet": part(0, 2005), "b.parquet": part(1, 2006, "kit.part0")})
    shared = replace(part(0, 2008), recipe=recipe(2008, ".0", aad_prefix=b"kit.part1"))
    yield folder("dek-shared", {"a.parquet": part(0, 2007), "b.parquet": shared})

    def one_key(seed: int, number: int, **hooks: Any) -> SealedFile:
        return SealedFile(recipe(seed, aad_prefix=f"kit.part{number}".encode(), **hooks))

    same = {"module": _at((DATA_PAGE, 0, _ID, 0), lambda module: setattr(module, "nonce", b"nonce-shared"))}
    pair: dict[str, SealedFile | bytes]
    pair = {"a.parquet": one_key(2013, 0, **same), "b.parquet": one_key(2014, 1, **same)}
    yield folder("nonce-shared", pair, "dek-shared")
    pair = {"a.parquet": one_key(2015, 0), "b.parquet": one_key(2016, 1)}
    yield folder("invocations-shared", pair, "dek-shared", invocation_limit=30)
    yield folder("plaintext-among", {**two, "c.parquet": plain_bytes()}, plaintext_files="allow")
    yield folder("plaintext-skipped", {**two, "_left_behind.parquet": plain_bytes()})
    yield folder("other-data", {**two, "_tmp/people.csv": b"id,name\n1,Ada\n"})
    summary = summary_bytes(["a.parquet", "b.parquet", "c.parquet"])
    yield folder("part-listed", {**two, "_metadata": summary}, "summary-file")
    yield folder("summary-file", {**two, "_metadata": plain_bytes()})
    yield folder("part-gap", {"a.parquet": part(0, 2009), "b.parquet": part(2, 2010)})
    nested = part(1, 2011, nested=True)
    nested.recipe.columns[3] = nested.recipe.columns[0]
    yield folder("same-columns", {"a.parquet": part(0, 2012), "b.parquet": nested})


def more_breaking_vectors() -> Iterator[Vector]:
    """Yield vectors that break a rule in a second way, which a reader may check in another place."""

    def page(name: str, title: str, made: Recipe) -> Vector:
        files = {f"{name}.parquet": SealedFile(made)}
        return Vector(f"broken/{name}.parquet", title, files, frozenset({"page-type"}), "page-type")

    first = _on_header((DATA_PAGE, 0, _ID, 0), _dictionary_type)
    title = "The first page of a chunk is a data page by its modules, and a dictionary page by its header"
    yield page("page-type-of-first-page", title, recipe(3001, page_header=first))
    second = _on_header((DATA_PAGE, 0, _ID, 1), _dictionary_type)
    made = recipe(3002, page_header=second, columns={_NAME: base_columns()[_NAME]})
    yield page("dictionary-behind-data", "A dictionary page behind a data page of a plaintext column", made)
    title = "An index page between data pages, which does not count as one of them"
    yield page("index-page", title, recipe(3003, pages=_index_page))


def _title(rule_id: str) -> str:
    return f"Breaks: {next(rule.holds for rule in RULES if rule.id == rule_id)}"
