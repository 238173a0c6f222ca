"""Module AADs (spec 4.4.2)."""

from __future__ import annotations

import pytest

from parquet_keytools.encryption.aad import ModuleType, module_aad
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
    with pytest.raises(FormatLimitError):
        module_aad(_FILE_AAD, ModuleType.DATA_PAGE, *ordinals)
