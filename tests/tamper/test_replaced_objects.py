"""Objects that are replaced between two requests of one reader: it reads one of them, the one it checked.

A store answers each request with the object that is there then. So checked bytes must not be requested again:
only the comparison of the AAD prefix authenticates which file a footer belongs to.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from delegating_handler import DelegatingHandler
from pyarrow import fs as pafs

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.errors import KeytoolsError

OWN = pa.table({"a": range(500), "b": ["of this file"] * 500})
OTHER = pa.table({"a": range(500), "b": ["of another"] * 500})
POLICY: dict[str, Any] = {
    "footer_key": "kf",
    "column_keys": {"ka": ["a"]},
    "unlisted_columns": "footer_key",
    "aad_prefix": "{table_name}/{file_name}",
}
FORMS: dict[str, dict[str, Any]] = {"encrypted footer": {}, "plaintext footer": {"plaintext_footer": True}}
MOST_REQUESTS = 60


def decrypted(tools: Keytools, path: str, store: pafs.FileSystem) -> pa.Table:
    target = Path(path).with_name("decrypted")
    tools.decrypt_file(path, target, source_filesystem=store)
    return pq.read_table(target)


READS: dict[str, Callable[[Keytools, str, pafs.FileSystem], pa.Table]] = {
    "read_table": lambda tools, path, store: tools.read_table(path, filesystem=store),
    "a folder": lambda tools, path, store: tools.read_table(path.rpartition("/")[0], filesystem=store),
    "dataset": lambda tools, path, store: tools.dataset(path.rpartition("/")[0], filesystem=store).to_table(),
    "decrypt_file": decrypted,
}


def keytools(**settings: Any) -> Keytools:
    keys = {name: base64.b64encode(hashlib.sha256(name.encode()).digest()[:16]).decode() for name in ("kf", "ka")}
    kms = {"type": "in_memory", "keys": keys}
    return Keytools(parse_configuration({"version": 1, "kms": kms, "tables": {"t": POLICY | settings}}))


class Store(DelegatingHandler):
    """Answers each request for the file with one of two objects, in the given order."""

    def __init__(self, objects: Iterator[bytes], length: int) -> None:
        super().__init__(pafs.LocalFileSystem())
        self.objects = objects
        self.length = length
        self.requests = 0

    def open_input_file(self, path: str) -> pa.NativeFile:
        return pa.PythonFile(_Requests(self), mode="r")


class _Requests(io.RawIOBase):
    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = (0, self._position, self._store.length)[whence] + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        self._store.requests += 1
        end = self._store.length if size < 0 else self._position + size
        data = next(self._store.objects)[self._position : end]
        self._position += len(data)
        return data


def of_length(content: bytes, length: int) -> bytes:
    """Return a file with unused bytes before its footer."""
    offset = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    return content[:offset] + bytes(length - len(content)) + content[offset:]


def two_files(tools: Keytools, path: Path) -> tuple[bytes, bytes]:
    """Make a file and another one of the same table, under the same KEKs and with the same length."""
    other = path.with_name("other.parquet")
    options: dict[str, Any] = {"compression": "none", "use_dictionary": False}
    tools.write_table(OWN, path, **options)
    tools.write_table(OTHER, other, **options)
    contents = path.read_bytes(), other.read_bytes()
    other.unlink()
    length = max(map(len, contents))
    own, another = (of_length(content, length) for content in contents)
    path.write_bytes(own)
    return own, another


def replaced(own: bytes, other: bytes, after: int, number: int) -> Iterator[bytes]:
    for request in range(10_000):
        yield other if after <= request < after + number else own


def check(tools: Keytools, path: Path, own: bytes, other: bytes, read: str, number: int) -> None:
    """Read while each request in turn is the first to find the other object."""
    passed = 0
    for after in range(MOST_REQUESTS):
        store = Store(replaced(own, other, after, number), len(own))
        with contextlib.suppress(KeytoolsError, OSError):
            assert READS[read](tools, str(path), pafs.PyFileSystem(store)).equals(OWN)
            passed += 1
        if store.requests <= after:
            # It was never replaced.
            assert passed
            return
    pytest.fail("the file is read without end")


@pytest.mark.parametrize("number", [1, 2, 10_000], ids=["once", "twice", "for good"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("read", READS)
def test_another_file_of_the_table(tmp_path: Path, read: str, form: str, number: int) -> None:
    """The AAD prefix of this file was compared, and then the footer of another file was read and believed."""
    tools = keytools(**FORMS[form])
    own, other = two_files(tools, tmp_path / "part-0.parquet")
    check(tools, tmp_path / "part-0.parquet", own, other, read, number)
