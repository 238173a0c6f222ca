"""What Arrow reads from, in place of the file itself."""

from __future__ import annotations

import threading

import pytest

from parquet_keytools.arrow import view_files
from parquet_keytools.arrow.view_files import SourceInParts
from parquet_keytools.storage.sources import BufferSource

CONTENT = bytes(range(100))


class Waiting(BufferSource):
    """A store that answers a request when another one is there, too."""

    both = threading.Barrier(2, timeout=60)

    def read_at(self, offset: int, length: int) -> memoryview:
        self.both.wait()
        return super().read_at(offset, length)


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_files, "PART_BYTES", 7)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 14, 15, 90])
def test_parts_make_the_range(length: int) -> None:
    source = SourceInParts(BufferSource("x", CONTENT))
    assert (source.path, source.size_bytes) == ("x", 100)
    assert bytes(source.read_at(10, length)) == CONTENT[10 : 10 + length]


def test_parts_are_read_at_the_same_time() -> None:
    assert SourceInParts(Waiting("x", CONTENT)).read_at(0, 14) == CONTENT[:14]
