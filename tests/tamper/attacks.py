"""Attacks on encrypted files by somebody who can write to the store and has no keys (spec 4.4).

Some need more than that, and say so: the footer key, or a writer who does something wrong. Each attack
turns good files into the folder that a reader then meets. The expected result of each of our readers and of
`verify` is stated with the attack, and so are changes that they cannot detect by design.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import struct
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from parquet_keytools import Keytools
from parquet_keytools.conformance.inspection import InspectedModule, Inspection
from parquet_keytools.conformance.report import Outcome
from parquet_keytools.encryption.aad import FOOTER_PLACE, ModulePlace, ModuleType
from parquet_keytools.errors import KeytoolsError
from parquet_keytools.files.opened_file import OpenedFile
from parquet_keytools.format.structs import ColumnMetaData, FileCryptoMetaData, FileMetaData
from parquet_keytools.storage.locations import FileLocation

MASTER_KEYS = {"footer": b"footer-key-16-by", "pii": b"pii-key-16-bytes", "place": b"place-key-16-byt"}

RIGHT, CHANGED, REFUSED, CRASHED = "reads the right data", "READS CHANGED DATA", "refuses", "CRASHES"
GARBAGE = "WRITES GARBAGE"

ROWS = 60


def table(first: int) -> pa.Table:
    """Return data whose pages all have the same length."""
    numbers = range(first, first + ROWS)
    return pa.table(
        {
            "x": pa.array(numbers, pa.int64()),
            "y": pa.array([1000 + n for n in numbers], pa.int64()),
            "secret": pa.array([2000 + n for n in numbers], pa.int64()),
            "other": pa.array([3000 + n for n in numbers], pa.int64()),
            "open": pa.array([4000 + n for n in numbers], pa.int64()),
        }
    )


def keytools(version: str = "v2", **changes: object) -> Keytools:
    """Return a Keytools; `secret`, `other` and `x` have their own keys."""
    policy: dict[str, object] = {
        "footer_key": "footer",
        "column_keys": {"pii": ["secret"], "place": ["other"], "footer": ["x"]},
        "unlisted_columns": "plaintext",
        "aad_prefix": f"shop/{version}/{{file_name}}",
    }
    document = {
        "version": 1,
        "kms": {
            "type": "in_memory",
            "keys": {name: base64.b64encode(key).decode() for name, key in MASTER_KEYS.items()},
        },
        "tables": {"shop": policy | changes},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # These attacks show that CTR does not authenticate.
        return Keytools.from_mapping(document)


class Scene:
    """Good files, from which the attacks are made.

    Attributes:
        folder: Has `a.parquet` and `b.parquet` of the present version, in a folder for each key policy.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(
            table(0),
            folder / "a.plain",
            compression="none",
            use_dictionary=False,
            row_group_size=30,
            data_page_size=1,
            write_batch_size=10,
            store_schema=False,
        )
        options = {"row_group_size": 30, "data_page_size": 1, "write_batch_size": 10, "store_schema": False}
        pq.write_table(table(7), folder / "b.plain", compression="none", use_dictionary=False, **options)
        for policy in POLICIES:
            for name in ("a", "b"):
                self.file(policy, name).parent.mkdir(exist_ok=True)
                self.keytools(policy).encrypt_file(folder / f"{name}.plain", self.file(policy, name))
        for policy in ("encrypted", "signed"):
            # One prefix is the beginning of the other.
            self.keytools(policy).encrypt_file(folder / "b.plain", self.longer_name(policy))
        (folder / "old").mkdir(exist_ok=True)
        keytools("v1", **POLICIES["encrypted"]).encrypt_file(folder / "b.plain", folder / "old" / "a.parquet")

    def file(self, policy: str, name: str = "a") -> Path:
        """Return the path of a good file."""
        return self.folder / policy / f"{name}.parquet"

    def longer_name(self, policy: str) -> Path:
        """Return the path of a good file whose name begins with the name of `a`."""
        return self.folder / policy / "a.parquet0"

    def data(self, policy: str, name: str = "a") -> bytes:
        """Return the bytes of a good file."""
        return self.file(policy, name).read_bytes()

    def keytools(self, policy: str) -> Keytools:
        """Return a Keytools that expects files of a policy."""
        return keytools(**POLICIES[policy])

    @contextlib.contextmanager
    def opened(self, policy: str, name: str = "a") -> Iterator[OpenedFile]:
        """Open a good file with its keys, for attacks that need more than the store."""
        # Programs that read the files import this source file from its own folder only.
        from key_services import key_service

        with self.keytools(policy) as reader:
            yield key_service(reader).open_files([FileLocation.resolve(self.file(policy, name))])[0]

    def inspect(self, policy: str, name: str = "a") -> Inspection:
        """Return the layout of a good file."""
        return self.keytools(policy).inspect_file(self.file(policy, name))

    def modules(self, policy: str, row_group: int, column: str, name: str = "a") -> list[InspectedModule]:
        """Return the modules of a chunk."""
        shown = self.inspect(policy, name)
        ordinal = next(item.ordinal for item in shown.columns if item.path == column)
        return next(
            list(chunk.modules)
            for chunk in shown.chunks
            if (chunk.row_group_ordinal, chunk.column_ordinal) == (row_group, ordinal)
        )


POLICIES: dict[str, dict[str, Any]] = {
    "encrypted": {"unlisted_columns": "footer_key"},
    "partial": {},
    "signed": {"plaintext_footer": True},
    "ctr": {"unlisted_columns": "footer_key", "algorithm": "AES_GCM_CTR_V1"},
    "external": {"unlisted_columns": "footer_key", "key_material": "external"},
}


@dataclass(frozen=True)
class Attack:
    """One attack.

    Attributes:
        title: A short description.
        policy: The key policy of the attacked file.
        make: Returns the bytes that then replace the file.
        error: What our readers must raise; None where the data is right, or where the change cannot be detected.
        rule: What `verify` must report; None where it can detect nothing.
        outcome: The result in our readers.
        prepare: Changes the files beside it.
        conforms: Whether `verify` still reports that the file conforms.
    """

    title: str
    policy: str
    make: Callable[[Scene], bytes]
    error: str | None
    rule: str | None
    outcome: str = REFUSED
    prepare: Callable[[Scene, Path], None] | None = None
    conforms: bool = False


def _swapped(data: bytes, one: tuple[int, int], two: tuple[int, int]) -> bytes:
    """Exchange two ranges of the same length."""
    (first, length), (second, other) = sorted((one, two))
    assert length == other and first + length <= second
    between = data[first + length : second]
    return (
        data[:first]
        + data[second : second + length]
        + between
        + data[first : first + length]
        + data[second + length :]
    )


def _page(modules: list[InspectedModule], module_type: ModuleType, ordinal: int) -> tuple[int, int]:
    found = next(m for m in modules if m.module_type is module_type and m.page_ordinal == ordinal)
    return found.offset, found.length


def _pages(modules: list[InspectedModule]) -> tuple[int, int]:
    start = min(m.offset for m in modules)
    return start, sum(m.length for m in modules)


def _swap_pages(scene: Scene) -> bytes:
    modules = scene.modules("encrypted", 0, "x")
    return _swapped(
        scene.data("encrypted"), _page(modules, ModuleType.DATA_PAGE, 0), _page(modules, ModuleType.DATA_PAGE, 1)
    )


def _swap_headers(scene: Scene) -> bytes:
    modules = scene.modules("encrypted", 0, "x")
    header = ModuleType.DATA_PAGE_HEADER
    return _swapped(scene.data("encrypted"), _page(modules, header, 1), _page(modules, header, 2))


def _swap_chunks(scene: Scene) -> bytes:
    return _swapped(
        scene.data("encrypted"),
        _pages(scene.modules("encrypted", 0, "y")),
        _pages(scene.modules("encrypted", 1, "y")),
    )


def _swap_columns(scene: Scene) -> bytes:
    return _swapped(
        scene.data("encrypted"),
        _pages(scene.modules("encrypted", 0, "y")),
        _pages(scene.modules("encrypted", 0, "open")),
    )


def _swap_row_groups(scene: Scene) -> bytes:
    data = scene.data("encrypted")
    for column in ("x", "y", "secret", "other", "open"):
        one, two = (_pages(scene.modules("encrypted", row_group, column)) for row_group in range(2))
        data = _swapped(data, one, two)
    return data


def _page_of_another_file(scene: Scene) -> bytes:
    data, other = bytearray(scene.data("encrypted")), scene.data("encrypted", "b")
    offset, length = _page(scene.modules("encrypted", 0, "x"), ModuleType.DATA_PAGE, 1)
    found, found_length = _page(scene.modules("encrypted", 0, "x", "b"), ModuleType.DATA_PAGE, 1)
    assert length == found_length
    data[offset : offset + length] = other[found : found + length]
    return bytes(data)


def _footer_start(data: bytes) -> int:
    return len(data) - 8 - struct.unpack("<I", data[-8:-4])[0]


def _with_footer(data: bytes, footer: bytes, magic: bytes | None = None) -> bytes:
    magic = magic or data[:4]
    return magic + data[4 : _footer_start(data)] + footer + struct.pack("<I", len(footer)) + magic


def _footer_of_another_file(scene: Scene) -> bytes:
    other = scene.data("encrypted", "b")
    return _with_footer(scene.data("encrypted"), other[_footer_start(other) : -8])


def _edited_crypto(change: Callable[[FileCryptoMetaData], None]) -> Callable[[Scene], bytes]:
    def make(scene: Scene) -> bytes:
        data = scene.data("encrypted")
        footer = data[_footer_start(data) : -8]
        crypto, end = FileCryptoMetaData.read(footer)
        change(crypto)
        return _with_footer(data, crypto.serialise() + footer[end:])

    return make


def _other_prefix(crypto: FileCryptoMetaData) -> None:
    parameters = crypto.encryption_algorithm.aes_gcm_v1
    assert parameters is not None
    parameters.aad_prefix = b"shop/v2/b.parquet"


def _moved_aad(
    file: Callable[[Scene], Path], move: Callable[[bytes, bytes], tuple[bytes | None, bytes]]
) -> Callable[[Scene], bytes]:
    """Return a function that moves bytes between the AAD prefix and the file unique of a file."""

    def make(scene: Scene) -> bytes:
        data = file(scene).read_bytes()
        footer = data[_footer_start(data) : -8]
        stored: FileCryptoMetaData | FileMetaData
        stored, end = FileCryptoMetaData.read(footer) if data[:4] == b"PARE" else FileMetaData.read(footer)
        algorithm = stored.encryption_algorithm
        parameters = None if algorithm is None else algorithm.aes_gcm_v1
        assert parameters is not None and parameters.aad_prefix and parameters.aad_file_unique
        moved = move(parameters.aad_prefix, parameters.aad_file_unique)
        parameters.aad_prefix, parameters.aad_file_unique = moved
        return _with_footer(data, stored.serialise() + footer[end:])

    return make


def _as_a(prefix: bytes, unique: bytes) -> tuple[bytes, bytes]:
    end = len(b"shop/v2/a.parquet")
    return prefix[:end], prefix[end:] + unique


def _ctr_for_gcm(crypto: FileCryptoMetaData) -> None:
    stored = crypto.encryption_algorithm
    stored.aes_gcm_ctr_v1, stored.aes_gcm_v1 = stored.aes_gcm_v1, None


def _ctr_and_damaged_pages(scene: Scene) -> bytes:
    data = bytearray(_edited_crypto(_ctr_for_gcm)(scene))
    for chunk in scene.inspect("encrypted").chunks:
        for module in chunk.modules:
            if module.module_type is ModuleType.DATA_PAGE:
                data[module.offset + module.length - 1] ^= 1
    return bytes(data)


def _other_kms(crypto: FileCryptoMetaData) -> None:
    assert crypto.key_metadata is not None
    fields = json.loads(crypto.key_metadata)
    crypto.key_metadata = json.dumps(fields | {"kmsInstanceURL": "https://attacker.example"}).encode()


def _signed_footer(scene: Scene) -> tuple[bytes, FileMetaData, bytes]:
    data = scene.data("signed")
    footer, end = FileMetaData.read(data[_footer_start(data) : -8])
    return data, footer, data[_footer_start(data) : -8][end:]


def _strip_signature(scene: Scene) -> bytes:
    data, footer, _ = _signed_footer(scene)
    return _with_footer(data, footer.serialise())


def _strip_all(scene: Scene) -> bytes:
    data, footer, _ = _signed_footer(scene)
    footer.encryption_algorithm = None
    footer.footer_signing_key_metadata = None
    return _with_footer(data, footer.serialise())


def _edit_statistics(scene: Scene) -> bytes:
    data, footer, signature = _signed_footer(scene)
    metadata = footer.row_groups[0].columns[4].meta_data
    assert metadata is not None
    for field_id, (wire_type, value) in metadata.struct.fields[12][1].fields.items():
        if isinstance(value, bytes) and len(value) == 8:
            metadata.struct.fields[12][1].set_entry(field_id, (wire_type, struct.pack("<q", -1)))
    return _with_footer(data, footer.serialise() + signature)


def _edited_chunk(change: Callable[[ColumnMetaData, FileMetaData], None]) -> Callable[[Scene], bytes]:
    """Return a function that changes the metadata of a chunk in a plaintext footer."""

    def make(scene: Scene) -> bytes:
        data, footer, signature = _signed_footer(scene)
        metadata = footer.row_groups[1].columns[_OPEN].meta_data
        assert metadata is not None
        change(metadata, footer)
        return _with_footer(data, footer.serialise() + signature)

    return make


def _edited_by_key_holder(change: Callable[[ColumnMetaData, FileMetaData], None]) -> Callable[[Scene], bytes]:
    """Return a function that changes the metadata of a chunk in an encrypted footer, with the footer key."""

    def make(scene: Scene) -> bytes:
        data = scene.data("encrypted")
        stored = data[_footer_start(data) : -8]
        _, end = FileCryptoMetaData.read(stored)
        with scene.opened("encrypted") as opened:
            cipher = opened.footer.cipher
            assert cipher is not None
            footer, _ = FileMetaData.read(cipher.decrypt(stored[end:], FOOTER_PLACE))
            metadata = footer.row_groups[1].columns[_OPEN].meta_data
            assert metadata is not None
            change(metadata, footer)
            return _with_footer(data, stored[:end] + cipher.encrypt(footer.serialise(), FOOTER_PLACE))

    return make


_OPEN = 4
"""Ordinal of a column whose metadata is in the footer itself."""


def _offset_out_of_range(metadata: ColumnMetaData, _: FileMetaData) -> None:
    metadata.data_page_offset = 10**12


def _offset_below_zero(metadata: ColumnMetaData, _: FileMetaData) -> None:
    metadata.data_page_offset = -(10**12)


def _length_out_of_range(metadata: ColumnMetaData, _: FileMetaData) -> None:
    metadata.total_compressed_size = 10**12


def _length_below_zero(metadata: ColumnMetaData, _: FileMetaData) -> None:
    metadata.total_compressed_size = -1


def _overlap(metadata: ColumnMetaData, footer: FileMetaData) -> None:
    other = footer.row_groups[0].columns[_OPEN].meta_data
    assert other is not None
    metadata.data_page_offset = other.data_page_offset


def _flip_magic(scene: Scene) -> bytes:
    data = scene.data("encrypted")
    return _with_footer(data, data[_footer_start(data) : -8], b"PAR1")


def _with_length(module_type: ModuleType, length: Callable[[int], int]) -> Callable[[Scene], bytes]:
    """Return a function that changes the length field of a module."""

    def make(scene: Scene) -> bytes:
        data = bytearray(scene.data("encrypted"))
        offset, whole = _page(scene.modules("encrypted", 0, "x"), module_type, 0)
        struct.pack_into("<I", data, offset, length(whole - 4))
        return bytes(data)

    return make


def _with_footer_length(length: Callable[[int], int]) -> Callable[[Scene], bytes]:
    def make(scene: Scene) -> bytes:
        data = scene.data("encrypted")
        (stored,) = struct.unpack("<I", data[-8:-4])
        return data[:-8] + struct.pack("<I", length(stored)) + data[-4:]

    return make


def _reuse_nonce(scene: Scene) -> bytes:
    data = bytearray(scene.data("encrypted"))
    modules = scene.modules("encrypted", 0, "x")
    first, _ = _page(modules, ModuleType.DATA_PAGE, 0)
    second, length = _page(modules, ModuleType.DATA_PAGE, 1)
    with scene.opened("encrypted") as opened:
        cipher = opened.footer.cipher_of(opened.footer.columns[0], opened.deks["x",])
        assert cipher is not None
        place = ModulePlace(ModuleType.DATA_PAGE, 0, 0, 1)
        plaintext = cipher.decrypt(data[second : second + length], place)
        data[second + 4 : second + 16] = nonce = data[first + 4 : first + 16]
        module = memoryview(data)[second + 16 : second + length]
        cipher.gcm.encrypt_into(nonce, plaintext, place.aad(cipher.file_aad), module)
    return bytes(data)


def _flipped_page(policy: str, column: str) -> Callable[[Scene], bytes]:
    def make(scene: Scene) -> bytes:
        data = bytearray(scene.data(policy))
        offset, length = _page(scene.modules(policy, 0, column), ModuleType.DATA_PAGE, 0)
        # The lowest byte of the second-last value in CTR; anything else in GCM.
        data[offset + length - 16] ^= 1
        return bytes(data)

    return make


def _made_with(**policy: Any) -> Callable[[Scene], bytes]:
    """Return a function that makes a file of other data, under the attacker's keys and the AAD prefix of `a`."""

    def make(scene: Scene) -> bytes:
        path = scene.folder / "made" / "a.parquet"
        path.parent.mkdir(exist_ok=True)
        with keytools(**policy) as maker:
            maker.encrypt_file(scene.folder / "b.plain", path)
        return path.read_bytes()

    return make


def _material_file(path: Path) -> Path:
    return path.with_name(f"_KEY_MATERIAL_FOR_{path.name}.json")


def _exchange_columns(scene: Scene, path: Path) -> None:
    materials = json.loads(_material_file(path).read_text(encoding="utf-8"))
    by_key = {json.loads(text)["masterKeyID"]: name for name, text in materials.items() if name != "footerKey"}
    one, two = by_key["pii"], by_key["place"]
    materials[one], materials[two] = materials[two], materials[one]
    _material_file(path).write_text(json.dumps(materials), encoding="utf-8")


def _exchange_files(scene: Scene, path: Path) -> None:
    shutil.copy(_material_file(scene.file("external", "b")), _material_file(path))


_HEADER = ModuleType.DATA_PAGE_HEADER

ATTACKS = {
    "pages": Attack(
        "two data pages of a chunk exchanged", "encrypted", _swap_pages, "DecryptionError", "data-page-authentic"
    ),
    "page-headers": Attack(
        "two page headers of a chunk exchanged",
        "encrypted",
        _swap_headers,
        "DecryptionError",
        "data-page-header-authentic",
    ),
    "chunks": Attack(
        "the chunks of a column in two row groups exchanged",
        "encrypted",
        _swap_chunks,
        "DecryptionError",
        "data-page-header-authentic",
    ),
    "columns": Attack(
        "two columns under one key exchanged",
        "encrypted",
        _swap_columns,
        "DecryptionError",
        "data-page-header-authentic",
    ),
    "row-groups": Attack(
        "two row groups exchanged", "encrypted", _swap_row_groups, "DecryptionError", "data-page-header-authentic"
    ),
    "foreign-page": Attack(
        "a page from the same place in another file",
        "encrypted",
        _page_of_another_file,
        "DecryptionError",
        "data-page-authentic",
    ),
    "file": Attack(
        "the file replaced by another file of the table",
        "encrypted",
        lambda scene: scene.data("encrypted", "b"),
        "AadPrefixError",
        "prefix-expected",
    ),
    "rollback": Attack(
        "the file replaced by an older version of it",
        "encrypted",
        lambda scene: (scene.folder / "old" / "a.parquet").read_bytes(),
        "AadPrefixError",
        "prefix-expected",
    ),
    "plaintext": Attack(
        "a plaintext file in place of the encrypted one",
        "encrypted",
        lambda scene: (scene.folder / "b.plain").read_bytes(),
        "NotEncryptedError",
        "encrypted",
    ),
    "footer": Attack(
        "the footer of another file", "encrypted", _footer_of_another_file, "AadPrefixError", "prefix-expected"
    ),
    "prefix": Attack(
        "the stored AAD prefix edited",
        "encrypted",
        _edited_crypto(_other_prefix),
        "AadPrefixError",
        "footer-authentic",
    ),
    "prefix-end": Attack(
        "`a.parquet0` passed off as `a.parquet`: the end of the stored AAD prefix moved to the file unique",
        "encrypted",
        _moved_aad(lambda scene: scene.longer_name("encrypted"), _as_a),
        "AadPrefixError",
        "file-unique-length",
    ),
    "prefix-end-signed": Attack(
        "the same in a plaintext footer, which is signed",
        "signed",
        _moved_aad(lambda scene: scene.longer_name("signed"), _as_a),
        "AadPrefixError",
        "file-unique-length",
    ),
    "prefix-whole": Attack(
        "another file of the table, its whole AAD prefix moved to the file unique",
        "encrypted",
        _moved_aad(lambda scene: scene.file("encrypted", "b"), lambda prefix, unique: (None, prefix + unique)),
        "AadPrefixError",
        "file-unique-length",
    ),
    "prefix-grown": Attack(
        "the beginning of the file unique moved to the AAD prefix",
        "encrypted",
        _moved_aad(
            lambda scene: scene.file("encrypted"), lambda prefix, unique: (prefix + unique[:4], unique[4:])
        ),
        "AadPrefixError",
        "file-unique-length",
    ),
    "algorithm": Attack(
        "AES_GCM_V1 turned into AES_GCM_CTR_V1 in FileCryptoMetaData",
        "encrypted",
        _edited_crypto(_ctr_for_gcm),
        "TableMismatchError",
        "algorithm-of-pages",
    ),
    "algorithm-and-pages": Attack(
        "the same, and a bit of every page flipped, so that no page authenticates",
        "encrypted",
        _ctr_and_damaged_pages,
        "TableMismatchError",
        "page-size",
    ),
    "kms": Attack(
        "a KMS of the attacker's named in the key material",
        "encrypted",
        _edited_crypto(_other_kms),
        None,
        "kms-named",
        RIGHT,
        conforms=True,
    ),
    "magic": Attack("PARE turned into PAR1", "encrypted", _flip_magic, "NotEncryptedError", "footer-thrift"),
    "module-length": Attack(
        "a module of four gigabytes",
        "encrypted",
        _with_length(_HEADER, lambda _: 2**32 - 1),
        "ParquetFormatError",
        "module-length",
    ),
    "module-empty": Attack(
        "a module of no bytes",
        "encrypted",
        _with_length(_HEADER, lambda _: 0),
        "ParquetFormatError",
        "module-length",
    ),
    "module-overlap": Attack(
        "a page header made to overlap with its page",
        "encrypted",
        _with_length(_HEADER, lambda length: length + 16),
        "DecryptionError",
        "data-page-header-authentic",
    ),
    "page-overlap": Attack(
        "a page made to overlap with the next header",
        "encrypted",
        _with_length(ModuleType.DATA_PAGE, lambda length: length + 16),
        "DecryptionError",
        "module-length",
    ),
    "footer-length": Attack(
        "a footer of four gigabytes",
        "encrypted",
        _with_footer_length(lambda _: 2**32 - 1),
        "ParquetFormatError",
        "footer-length",
    ),
    "footer-empty": Attack(
        "a footer of no bytes",
        "encrypted",
        _with_footer_length(lambda _: 0),
        "ParquetFormatError",
        "footer-length",
    ),
    "footer-overlap": Attack(
        "a footer made to overlap with the pages",
        "encrypted",
        _with_footer_length(lambda length: length + 100),
        "ParquetFormatError",
        "footer-thrift",
    ),
    "truncated": Attack(
        "the end of the file cut off",
        "encrypted",
        lambda scene: scene.data("encrypted")[:-100],
        "ParquetFormatError",
        "magic",
    ),
    "signature": Attack(
        "the signature of a plaintext footer removed",
        "signed",
        _strip_signature,
        "FooterSignatureError",
        "signature-present",
    ),
    "signature-and-algorithm": Attack(
        "the signature and the algorithm removed", "signed", _strip_all, "NotEncryptedError", "algorithm-stated"
    ),
    "statistics": Attack(
        "statistics in a plaintext footer edited",
        "signed",
        _edit_statistics,
        "FooterSignatureError",
        "signature-valid",
    ),
    "offset": Attack(
        "an offset in a plaintext footer out of range",
        "signed",
        _edited_chunk(_offset_out_of_range),
        "FooterSignatureError",
        "signature-valid",
    ),
    "offset-below-zero": Attack(
        "an offset in a plaintext footer below zero",
        "signed",
        _edited_chunk(_offset_below_zero),
        "FooterSignatureError",
        "signature-valid",
    ),
    "length": Attack(
        "a length in a plaintext footer out of range",
        "signed",
        _edited_chunk(_length_out_of_range),
        "FooterSignatureError",
        "signature-valid",
    ),
    "overlap": Attack(
        "two chunks in a plaintext footer made to overlap",
        "signed",
        _edited_chunk(_overlap),
        "FooterSignatureError",
        "signature-valid",
    ),
    "sealed-offset": Attack(
        "with the footer's key: an offset in an encrypted footer out of range",
        "encrypted",
        _edited_by_key_holder(_offset_out_of_range),
        "ParquetFormatError",
        "layout-range",
    ),
    "sealed-offset-below-zero": Attack(
        "with the footer's key: an offset in an encrypted footer below zero",
        "encrypted",
        _edited_by_key_holder(_offset_below_zero),
        "ParquetFormatError",
        "layout-range",
    ),
    "sealed-length": Attack(
        "with the footer's key: a length in an encrypted footer out of range",
        "encrypted",
        _edited_by_key_holder(_length_out_of_range),
        "ParquetFormatError",
        "layout-range",
    ),
    "sealed-length-below-zero": Attack(
        "with the footer's key: a length in an encrypted footer below zero",
        "encrypted",
        _edited_by_key_holder(_length_below_zero),
        "ParquetFormatError",
        "layout-range",
    ),
    "sealed-overlap": Attack(
        "with the footer's key: two chunks in an encrypted footer made to overlap",
        "encrypted",
        _edited_by_key_holder(_overlap),
        "ParquetFormatError",
        "layout-overlap",
    ),
    "foreign-file": Attack(
        "with the key of another table: a file under that key, whole",
        "encrypted",
        _made_with(footer_key="place", column_keys={}, unlisted_columns="footer_key"),
        "TableMismatchError",
        "wanted-keys",
    ),
    "foreign-footer": Attack(
        "with the key of another table: a footer under that key, and all columns in plaintext",
        "encrypted",
        _made_with(footer_key="place", column_keys={}),
        "TableMismatchError",
        "wanted-keys",
    ),
    "foreign-column": Attack(
        "with the footer's key and another table's key: a column under the latter",
        "encrypted",
        _made_with(column_keys={"place": ["secret", "other"], "footer": ["x"]}, unlisted_columns="footer_key"),
        "TableMismatchError",
        "wanted-keys",
    ),
    "footer-key-for-columns": Attack(
        "with the footer's key: columns under that key in place of their own",
        "encrypted",
        _made_with(column_keys={}, unlisted_columns="footer_key"),
        "TableMismatchError",
        "wanted-keys",
    ),
    "plaintext-columns": Attack(
        "with the footer's key: columns in plaintext",
        "encrypted",
        _made_with(column_keys={"footer": ["x"]}),
        "TableMismatchError",
        "wanted-encryption",
    ),
    "plaintext-columns-signed": Attack(
        "the same in a plaintext footer, which is signed",
        "signed",
        _made_with(column_keys={"footer": ["x"]}, plaintext_footer=True),
        "TableMismatchError",
        "wanted-encryption",
    ),
    "nonce": Attack(
        "by the writer: a nonce used twice (the data is right; readers compare no nonces, and `verify` does)",
        "encrypted",
        _reuse_nonce,
        None,
        "nonce-reuse",
        RIGHT,
    ),
    "column-keys": Attack(
        "the key material of two columns exchanged",
        "external",
        lambda scene: scene.data("external"),
        "TableMismatchError",
        "column-metadata-authentic",
        prepare=_exchange_columns,
    ),
    "file-keys": Attack(
        "the key material of another file",
        "external",
        lambda scene: scene.data("external"),
        "DecryptionError",
        "footer-authentic",
        prepare=_exchange_files,
    ),
    "gcm-bit": Attack(
        "a bit of a page flipped, AES_GCM_V1",
        "encrypted",
        _flipped_page("encrypted", "secret"),
        "DecryptionError",
        "data-page-authentic",
    ),
    "ctr-bit": Attack(
        "a bit of a page flipped, AES_GCM_CTR_V1 (undetectable: the cipher does not authenticate)",
        "ctr",
        _flipped_page("ctr", "secret"),
        None,
        None,
        CHANGED,
        conforms=True,
    ),
    "plaintext-bit": Attack(
        "a bit of a plaintext column flipped (undetectable: nothing authenticates it)",
        "partial",
        _flipped_page("partial", "open"),
        None,
        None,
        CHANGED,
        conforms=True,
    ),
}


class Attacked:
    """All attacks, each in its own folder."""

    def __init__(self, folder: Path) -> None:
        self.scene = Scene(folder / "good")
        self.paths: dict[str, Path] = {}
        for name, attack in ATTACKS.items():
            path = folder / name / "a.parquet"
            path.parent.mkdir()
            material = _material_file(self.scene.file(attack.policy))
            if material.exists():
                shutil.copy(material, _material_file(path))
            if attack.prepare is not None:
                attack.prepare(self.scene, path)
            path.write_bytes(attack.make(self.scene))
            self.paths[name] = path
        self.right = table(0)

    def read_table(self, name: str) -> tuple[str, str]:
        """Return the outcome of an attack in `Keytools.read_table`, and the error's class."""
        with self.scene.keytools(ATTACKS[name].policy) as reader:
            return self._outcome(lambda: reader.read_table(self.paths[name]))

    def decrypt_file(self, name: str) -> tuple[str, str]:
        """Return the outcome of an attack in `Keytools.decrypt_file`, and the error's class."""
        target = self.paths[name].with_name("decrypted.parquet")

        def decrypt() -> pa.Table:
            with self.scene.keytools(ATTACKS[name].policy) as reader:
                reader.decrypt_file(self.paths[name], target)
            try:
                return pq.read_table(target)
            except (OSError, pa.ArrowException):
                return None

        return self._outcome(decrypt)

    def _outcome(self, read: Callable[[], pa.Table]) -> tuple[str, str]:
        try:
            found = read()
        except (KeytoolsError, OSError, pa.ArrowException) as error:
            return REFUSED, type(error).__name__
        if found is None:
            return GARBAGE, ""
        return (RIGHT if found.equals(self.right) else CHANGED), ""

    def verify(self, name: str) -> tuple[bool, set[str]]:
        """Return whether `verify` reports that the file conforms, and which rules are broken."""
        with self.scene.keytools(ATTACKS[name].policy) as reader:
            report = reader.verify_file(self.paths[name])
        return report.conforms, {r.rule.id for r in report.rules if r.outcome is Outcome.BROKEN}
