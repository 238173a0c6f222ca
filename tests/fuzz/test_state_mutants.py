"""Mutants of the key material and footers in or beside a valid data set.

Each goes through rotate, keys, rekey or read. It ends in the right data or in an error that names the file, and
never in a false "done" or "not needed". MUTANTS sets their number; `make mutants` uses 200,000.
"""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pytest
from cryptography.exceptions import InvalidTag
from soak import how_many

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.errors import KeytoolsError, MasterKeyDisabledError, WrappedKeyInvalidError
from parquet_keytools.files import opened_file
from parquet_keytools.format.file_layout import with_trailer
from parquet_keytools.format.structs import FileCryptoMetaData, FileMetaData
from parquet_keytools.format.thrift import Struct, ThriftList, WireType
from parquet_keytools.kms.aes_key_wrap import unwrap_key, wrap_key
from parquet_keytools.kms.contract_tests import unwrap_one, wrap_one
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.rotation import data_set_run, inventory
from parquet_keytools.rotation.file_keys import read_tail
from parquet_keytools.rotation.report import Outcome
from parquet_keytools.rotation.rotate import footer_of
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.storage.locations import FileLocation

MUTANTS = how_many(250, 200_000)
NAMES = ("kf", "ka", "kb", "kc")
TABLE = pa.table({"a": [1, 2], "b": ["x", "y"]})
KEYS = {name: [f"{name} version {number}".ljust(32).encode() for number in (1, 2)] for name in NAMES}


class LabelledKms(InMemoryKms):
    """States and binds in a wrapped key which version wrapped it, as a keystore or Vault does."""

    def wrapped_key_version(self, wrapped_key: str, master_key_id: str) -> str | None:
        label, colon, _ = wrapped_key.partition(":")
        return label if colon and label in ("1", "2") else None

    def _wrap(self, key: SecretBytes, master_key_id: str) -> str:
        versions = self._usable(master_key_id, "wrap").versions
        label = str(len(versions))
        return f"{label}:{wrap_key(versions[-1].key, key, f'{master_key_id} {label}'.encode())}"

    def _unwrap(self, wrapped_key: str, master_key_id: str) -> SecretBytes:
        versions = self._usable(master_key_id, "unwrap").versions
        label, _, data = wrapped_key.partition(":")
        if label not in ("1", "2") or int(label) > len(versions):
            raise WrappedKeyInvalidError
        version = versions[int(label) - 1]
        if not version.enabled:
            raise MasterKeyDisabledError(backend=self.backend, operation="unwrap", master_key_id=master_key_id)
        try:
            return unwrap_key(version.key, data, f"{master_key_id} {label}".encode())
        except InvalidTag:
            raise WrappedKeyInvalidError from None

    @classmethod
    def with_versions(cls, number: int) -> Self:
        return cls({name: versions[:number] for name, versions in KEYS.items()})


def tools_of(kms: InMemoryKms, **settings: Any) -> Keytools:
    table = {
        "footer_key": "kf",
        "column_keys": {"ka": ["a"], "kb": ["b"]},
        "unlisted_columns": "plaintext",
        "cache_lifetime_seconds": 0,
        **settings,
    }
    document = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": list(NAMES)},
        "tables": {"t": table},
        "reading": {"cache_lifetime_seconds": 0},
    }
    return Keytools(parse_configuration(document), kms=kms)


@dataclass
class Base:
    """A valid data set of one file, and its readers."""

    settings: dict[str, Any]
    files: dict[str, bytes]
    tools: Keytools
    without: dict[tuple[str, str], Keytools]
    """(master key, version) -> tools whose KMS has that version disabled."""
    without_old: Keytools


VARIANTS: list[dict[str, Any]] = [
    {"key_material": key_material, "plaintext_footer": plaintext_footer, "double_wrapping": double}
    for key_material in ("internal", "external")
    for plaintext_footer in (False, True)
    for double in (True, False)
]


def base(folder: Path, settings: dict[str, Any]) -> Base:
    """Make a file whose master keys have got another version since."""
    folder.mkdir(parents=True)
    path = folder / "x.parquet"
    tools_of(LabelledKms.with_versions(1), **settings).write_table(TABLE, path)
    tools = tools_of(LabelledKms.with_versions(2), **settings)
    without = {}
    for name in NAMES:
        for version in ("1", "2"):
            kms = LabelledKms.with_versions(2)
            kms.disable(name, int(version))
            without[name, version] = tools_of(kms, **settings)
    old = LabelledKms.with_versions(2)
    for name in NAMES:
        old.disable(name, 1)
    return Base(settings, {}, tools, without, tools_of(old, **settings))


def states(folder: Path, settings: dict[str, Any]) -> Iterator[Base]:
    """Yield data sets: not rotated, rotated in part, and rotated."""
    choices: dict[str, dict[str, Any] | None] = {"old": None, "part": {"only_master_keys": ["ka"]}, "new": {}}
    for name, options in choices.items():
        found = base(folder / name, settings)
        if options is not None:
            assert found.tools.rotate(folder / name, **options).succeeded
        found.files = {path.name: path.read_bytes() for path in (folder / name).iterdir()}
        yield found


# --- mutants ---


def mutant_bytes(data: bytes, generator: random.Random) -> bytes:
    if not data:
        return b"x"
    at, kind = generator.randrange(len(data)), generator.randrange(6)
    if kind < 3:
        out = bytearray(data)
        out[at] ^= 1 << generator.randrange(8)
        return bytes(out)
    if kind == 3:
        return data[:at]
    other, size = generator.randrange(len(data)), generator.randrange(1, 60)
    return data[:at] + (data[other : other + size] if kind == 4 else b"") + data[at + 1 :]


def mutant_material(text: str, generator: random.Random) -> str:
    """Return key material with a field changed, by an attacker who knows its meaning."""
    fields = json.loads(text)
    name = generator.choice(sorted(fields))
    kind = generator.randrange(7)
    if kind == 0:
        fields["masterKeyID"] = generator.choice((*NAMES, "k%66", "kf ", "KF", ""))
    elif kind == 1:
        for wrapped in ("wrappedKEK", "wrappedDEK"):
            if ":" in str(fields.get(wrapped, "")):
                label, _, rest = fields[wrapped].partition(":")
                fields[wrapped] = f"{generator.choice(('1', '2', '3', '01', label))}:{rest}"
    elif kind == 2:
        del fields[name]
    elif kind == 3:
        fields[name] = generator.choice((True, False, None, 1, "", [], {}, "x" * 100))
    elif kind == 4 and isinstance(fields[name], str):
        fields[name] = mutant_bytes(fields[name].encode(), generator).decode("latin-1")
    elif kind == 5:
        fields["isFooterKey"] = not fields.get("isFooterKey", False)
    else:
        fields[generator.choice(("unknown", "storedInternally"))] = generator.choice((1, "x", None))
    return json.dumps(fields)


def mutant_entries(data: bytes, generator: random.Random) -> bytes:
    """Return a key material file with entries changed, swapped, removed or added."""
    texts = json.loads(data)
    one, other = generator.choice(sorted(texts)), generator.choice(sorted(texts))
    kind = generator.randrange(5)
    if kind == 0:
        texts[one], texts[other] = texts[other], texts[one]
    elif kind == 1:
        del texts[one]
    elif kind == 2:
        texts["stash"] = texts[one]
    else:
        texts[one] = mutant_material(texts[one], generator)
    return json.dumps(texts).encode()


def _strings(root: Struct) -> Iterator[tuple[Struct, int]]:
    for field_id, (_, value) in list(root.fields.items()):
        yield root, field_id
        for inner in value.elements if isinstance(value, ThriftList) else [value]:
            if isinstance(inner, Struct):
                yield from _strings(inner)


def mutant_footer(data: bytes, path: Path, generator: random.Random) -> bytes:
    """Return a file whose footer, or the part before an encrypted one, has other fields."""
    path.write_bytes(data)
    tail, _ = read_tail(FileLocation.resolve(path))
    footer, is_encrypted = footer_of(tail.data), data.endswith(b"PARE")
    record, end = FileCryptoMetaData.read(footer) if is_encrypted else FileMetaData.read(footer)
    places = list(_strings(record.struct))
    materials = [
        (holder, field_id)
        for holder, field_id in places
        if isinstance(holder.fields[field_id][1], bytes | memoryview)
        and bytes(holder.fields[field_id][1]).startswith(b'{"key')
    ]
    kind = generator.randrange(5)
    if materials and kind < 3:
        holder, field_id = generator.choice(materials)
        text = bytes(holder.fields[field_id][1]).decode()
        if kind == 2 and len(materials) > 1:
            other, other_id = generator.choice(materials)
            mine, theirs = holder.entry(field_id), other.entry(other_id)
            holder.set_entry(field_id, theirs)
            other.set_entry(other_id, mine)
        else:
            changed = mutant_material(text, generator).encode("utf-8", "replace")
            holder.set_entry(field_id, (WireType.BINARY, changed))
    else:
        holder, field_id = generator.choice(places)
        if kind == 3 and field_id in holder.fields:
            holder.set_entry(field_id, None)
        else:
            holder.set_entry(generator.choice((field_id, 8, 9)), (WireType.BINARY, b"kf"))
    return data[: tail.offset] + with_trailer(record.struct.as_bytes() + footer[end:], data[-4:])


def mutate(found: Base, folder: Path, generator: random.Random) -> dict[str, bytes]:
    files = dict(found.files)
    kinds = ["footer", "footer bytes", "magic"]
    material = next((name for name in files if name.startswith("_KEY_MATERIAL")), None)
    if material is not None:
        kinds += ["entries"] * 4 + ["material bytes"]
    kind = generator.choice(kinds)
    data = files["x.parquet"]
    length = int.from_bytes(data[-8:-4], "little") + 8
    if kind == "footer":
        files["x.parquet"] = mutant_footer(data, folder / "x.parquet", generator)
    elif kind == "footer bytes":
        files["x.parquet"] = data[:-length] + mutant_bytes(data[-length:], generator)
    elif kind == "magic":
        files["x.parquet"] = data[:-4] + generator.choice((b"PAR1", b"PARE"))
    elif kind == "entries":
        assert material is not None
        files[material] = mutant_entries(files[material], generator)
    else:
        assert material is not None
        files[material] = mutant_bytes(files[material], generator)
    return files


# --- invariants ---


def reads(tools: Keytools, path: Path) -> bool:
    try:
        return bool(tools.read_table(path).equals(TABLE))
    except (KeytoolsError, OSError):
        return False


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def check_rotate(found: Base, folder: Path, files: dict[str, bytes]) -> str:
    (file,) = found.tools.rotate(folder).files
    if file.outcome is Outcome.FAILED:
        assert contents(folder) == files, "a failure changed something"
        assert file.path == str(folder / "x.parquet") and str(file.error)
    else:
        assert file.outcome in (Outcome.ROTATED, Outcome.ALREADY_CURRENT), file
        assert reads(found.without_old, folder / "x.parquet"), file
    return file.outcome.value


def check_keys(found: Base, folder: Path, files: dict[str, bytes]) -> str:
    (file,) = found.tools.key_inventory(folder)
    assert contents(folder) == files and file.path == str(folder / "x.parquet")
    for (name, version), without in found.without.items():
        if file.depends_on(name, version) is False:
            assert file.unknown is None
            assert reads(without, folder / "x.parquet"), f"{name}@{version} is needed"
    return "unknown" if file.unknown is not None else "listed"


def check_rekey(found: Base, folder: Path, files: dict[str, bytes]) -> str:
    report = found.tools.rekey_in_place(folder)
    (file,) = report.files
    if file.outcome is Outcome.REKEYED:
        assert reads(found.without_old, folder / "x.parquet"), file
    else:
        assert file.outcome is Outcome.FAILED, file
        assert contents(folder) == files, "a failure changed something"
    return file.outcome.value


def check_read(found: Base, folder: Path, files: dict[str, bytes]) -> str:
    try:
        table = found.tools.read_table(folder / "x.parquet")
    except (KeytoolsError, OSError):
        return "refused"
    assert table.equals(TABLE)
    return "read"


CHECKS: tuple[Callable[[Base, Path, dict[str, bytes]], str], ...] = (
    check_rotate,
    check_rotate,
    check_rotate,
    check_keys,
    check_keys,
    check_rekey,
    check_read,
)


class Inline:
    """Does a thread pool's work in this thread: one file needs no pool, and its threads take long."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, function: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
        return map(function, *arguments)


@pytest.fixture
def fast_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An in-memory folder, if available, and no syncing to disk: power failures are not tested here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    for module in (data_set_run, inventory, opened_file):
        monkeypatch.setattr(module, "ThreadPoolExecutor", Inline)
    memory, name = Path("/dev/shm"), f"state-mutants-{os.getpid()}-{time.monotonic_ns()}"
    folder = memory / name if memory.is_dir() else tmp_path / "data"
    folder.mkdir(mode=0o700)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.timeout(7200)
def test_no_mutant_is_taken_for_done(fast_folder: Path) -> None:
    bases = [
        found
        for number, settings in enumerate(VARIANTS)
        for found in states(fast_folder / f"base-{number}", settings)
    ]
    seen: dict[tuple[str, str], int] = {}
    folder = fast_folder / "mutant"
    started = time.monotonic()
    for seed in range(MUTANTS):
        generator = random.Random(f"state {seed}")
        found, check = generator.choice(bases), generator.choice(CHECKS)
        folder.mkdir()
        try:
            files = mutate(found, folder, generator)
            for name, data in files.items():
                (folder / name).write_bytes(data)
            outcome = check(found, folder, files)
        except Exception as error:
            error.add_note(f"mutant {seed}, {check.__name__}, {found.settings}")
            raise
        seen[check.__name__, outcome] = seen.get((check.__name__, outcome), 0) + 1
        shutil.rmtree(folder)
    print(f"\n{(time.monotonic() - started) / max(MUTANTS, 1) * 1000:.2f} ms each; {sorted(seen.items())}")
    if MUTANTS >= 500:
        wanted = {("check_rotate", "failed"), ("check_rotate", "rotated"), ("check_rotate", "already current")}
        wanted |= {("check_keys", "unknown"), ("check_keys", "listed")}
        wanted |= {("check_rekey", "failed"), ("check_rekey", "rekeyed")}
        assert wanted | {("check_read", "refused"), ("check_read", "read")} <= seen.keys()


def test_the_kms_of_these_tests_binds_its_labels() -> None:
    kms = LabelledKms.with_versions(2)
    wrapped = wrap_one(kms, SecretBytes(bytes(16)), "ka")
    assert kms.wrapped_key_version(wrapped, "ka") == "2"
    for other in (f"1{wrapped[1:]}", wrapped[2:], f"3{wrapped[1:]}", base64.b64encode(bytes(44)).decode()):
        with pytest.raises(KeytoolsError):
            unwrap_one(kms, other, "ka")
