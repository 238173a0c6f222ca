"""Module AADs (spec 4.4.2)."""

from __future__ import annotations

import struct

import pytest

from parquet_keytools.encryption.aad import ModuleType, module_aad, module_behind, random_file_unique
from parquet_keytools.errors import FormatLimitError

_FILE_AAD = b"prefix" + bytes(range(8))


@pytest.mark.parametrize(
    ("module_type", "suffix"),
    [
        (ModuleType.FOOTER, "00"),
        (ModuleType.COLUMN_META_DATA, "010201ff7f"),
        (ModuleType.DATA_PAGE, "020201ff7f0300"),
        (ModuleType.DICTIONARY_PAGE, "030201ff7f"),
        (ModuleType.DATA_PAGE_HEADER, "040201ff7f0300"),
        (ModuleType.DICTIONARY_PAGE_HEADER, "050201ff7f"),
        (ModuleType.COLUMN_INDEX, "060201ff7f"),
        (ModuleType.OFFSET_INDEX, "070201ff7f"),
        (ModuleType.BLOOM_FILTER_HEADER, "080201ff7f"),
        (ModuleType.BLOOM_FILTER_BITSET, "090201ff7f"),
    ],
)
def test_the_suffix_has_the_parts_of_its_module_type(module_type: ModuleType, suffix: str) -> None:
    assert module_aad(_FILE_AAD, module_type, 0x0102, 32_767, 3) == _FILE_AAD + bytes.fromhex(suffix)


@pytest.mark.parametrize("ordinal", [-1, 32_768, 65_536, None])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_ordinal_out_of_range_is_refused_and_never_narrowed(ordinal: int | None, which: int) -> None:
    ordinals: list[int | None] = [0, 0, 0]
    ordinals[which] = ordinal
    with pytest.raises(FormatLimitError, match=r"is not in 0\.\.32767\. Write fewer row groups"):
        module_aad(_FILE_AAD, ModuleType.DATA_PAGE, *ordinals)


def test_the_aad_of_another_module_that_makes_that_of_a_footer() -> None:
    unique = bytes(range(100, 108))
    for module_type in list(ModuleType)[1:]:
        for page_ordinal in (0, 255):
            suffix = (module_type, 3, 255, page_ordinal)
            aad = module_aad(unique, *suffix)
            assert aad[-1] == ModuleType.FOOTER
            assert module_aad(aad[:-1], ModuleType.FOOTER) == aad
            assert module_behind(b"", aad[:-1]) is module_type
            assert module_behind(b"prefix", aad[:-1]) is module_type
    for length in range(40):
        assert module_behind(b"", bytes(length)) is None
        assert module_behind(b"", b"\x7f" * length) is None
    assert module_behind(b"", unique + b"\2\0\0\0") is None
    assert module_behind(b"", unique + b"\1\0\0\0\0\0") is None


@pytest.mark.parametrize("prefix", [b"", b"flights/part-0.parquet\0"])
@pytest.mark.parametrize("ordinals", [(0, 0, 0), (255, 7, 255), (3, 255, 1)])
def test_it_is_found_wherever_prefix_and_file_unique_are_cut(
    prefix: bytes, ordinals: tuple[int, int, int]
) -> None:
    whole_prefix = prefix + bytes(range(100, 108))
    for module_type in (ModuleType.DATA_PAGE, ModuleType.DICTIONARY_PAGE):
        whole = module_aad(whole_prefix, module_type, *ordinals)[:-1]
        for cut in range(len(whole) + 1):
            assert module_behind(whole[:cut], whole[cut:]) is module_type, cut


def test_what_writers_make_does_not_look_so() -> None:
    for count in range(2000):
        unique = struct.pack("<Q", count * 0x9E37_79B9_7F4A_7C15 % 2**64)
        assert module_behind(b"", unique) is None
        assert module_behind(b"", unique[:4] + b"\2\0\0\0") is None, "8 bytes and no prefix: nothing was moved"
        for prefix in (b"f", b"tables", b"flights/part-0.parquet", b"flights/part-0.parquet\0"):
            assert module_behind(prefix, unique) is None


def test_a_new_file_unique_is_drawn_again_where_it_looks_so(monkeypatch: pytest.MonkeyPatch) -> None:
    good = bytes(range(100, 108))
    page, dictionary_page = b"\x64\x65\2\7\0\7\0\7", b"\x64\x65\x66\x67\3\7\0\7"
    for prefix in (b"abcdef", b"flights/part-0.parquet", b"flights/part-0.parquet\0"):
        assert module_behind(prefix, page) is ModuleType.DATA_PAGE
        assert module_behind(prefix, dictionary_page) is ModuleType.DICTIONARY_PAGE
    drawn = iter([page, dictionary_page, good])
    monkeypatch.setattr("os.urandom", lambda length: next(drawn))
    assert random_file_unique() == good
