"""The keystore: its file, its cryptography, many processes that use it, and its client."""

import base64
import fcntl
import json
import multiprocessing
import os
import stat
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidTag
from pydantic import ValidationError
from soak import sample

from parquet_keytools.errors import (
    KeytoolsError,
    KmsConfigurationError,
    KmsResponseInvalidError,
    KmsUnavailableError,
    MasterKeyDisabledError,
    MasterKeyNotFoundError,
    OutputError,
    WrappedKeyInvalidError,
)
from parquet_keytools.kms import keystore_file
from parquet_keytools.kms import passphrase as private_file
from parquet_keytools.kms.aes_key_wrap import unwrap_key, wrap_key
from parquet_keytools.kms.client import MasterKeyDescription, UnwrapRequest
from parquet_keytools.kms.contract_tests import unwrap_one, wrap_one
from parquet_keytools.kms.keystore_file import (
    Keystore,
    KeystoreDocument,
    KeystoreKms,
    KeystoreSettings,
    PassphraseKeys,
)
from parquet_keytools.kms.passphrase import passphrase_from_file, passphrase_from_text
from parquet_keytools.secret_bytes import SecretBytes

PASSPHRASE = "canary horse battery"
KEY = SecretBytes(b"canary key bytes")
FAST = 2**14


def right() -> SecretBytes:
    return SecretBytes(PASSPHRASE.encode())


def wrong() -> SecretBytes:
    return SecretBytes(b"another passphrase")


def create(path: Path, *names: str) -> Keystore:
    keystore = Keystore.create(
        path, right, scrypt_n=FAST, clock=lambda: datetime(2026, 1, 31, 12, 0, 0, 999, tzinfo=UTC)
    )
    for name in names:
        keystore.create_key(name)
    return keystore


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("example") / "keystore.json"
    create(path, "a", "b").rotate_key("a")
    return path.read_bytes()


@pytest.fixture
def path(example: bytes, tmp_path: Path) -> Path:
    """A keystore with two master keys, one of them with two versions."""
    path = tmp_path / "keystore.json"
    path.touch(0o600)
    path.write_bytes(example)
    return path


_derive = PassphraseKeys.derive
_derived: dict[tuple[bytes, str], PassphraseKeys] = {}


@pytest.fixture(autouse=True)
def scrypt_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The n of each scrypt run; repeated runs are cached, to save time."""
    runs: list[int] = []

    def derive(passphrase: SecretBytes, scrypt: Any) -> PassphraseKeys:
        runs.append(scrypt.n)
        of = (passphrase.reveal(), scrypt.model_dump_json())
        if of not in _derived:
            _derived[of] = _derive(passphrase, scrypt)
        return _derived[of]

    monkeypatch.setattr(PassphraseKeys, "derive", derive)
    return runs


@pytest.fixture
def kms(path: Path) -> KeystoreKms:
    return KeystoreKms(path, right)


def shape(keystore: Keystore) -> dict[str, list[tuple[int, bool]]]:
    """Master keys, their versions, and whether these are enabled; each key is also unwrapped."""
    opened = keystore.open()
    return {
        name: [
            (version.version, key.enabled and version.enabled)
            for version in key.versions
            if len(opened.key(name, version)) == 32
        ]
        for name, key in opened.master_keys.items()
    }


# --- the file ---


def test_the_format_is_as_documented(path: Path) -> None:
    """Opened here with only the documentation and primitives."""
    from cryptography.hazmat.primitives import hashes, hmac
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
    from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

    document = json.loads(path.read_text())
    assert (document["format"], document["format_version"]) == ("parquet-keytools keystore", 1)
    scrypt = document["scrypt"]
    salt = base64.b64decode(scrypt["salt"])
    root = Scrypt(salt, 32, scrypt["n"], scrypt["r"], scrypt["p"]).derive(PASSPHRASE.encode())

    def expand(name: str) -> bytes:
        return HKDFExpand(hashes.SHA256(), 32, f"parquet-keytools keystore 1 {name}".encode()).derive(root)

    assert base64.b64decode(document["passphrase_check"]) == expand("check")
    mac = hmac.HMAC(expand("mac"), hashes.SHA256())
    unsigned = {name: value for name, value in document.items() if name != "mac"}
    mac.update(json.dumps(unsigned, sort_keys=True, separators=(",", ":")).encode())
    mac.verify(base64.b64decode(document["mac"]))
    assert list(document["master_keys"]) == ["a", "b"]
    versions = document["master_keys"]["a"]["versions"]
    assert [version["version"] for version in versions] == [1, 2]
    assert versions[0]["created"] == "2026-01-31T12:00:00Z"
    wrapped = base64.b64decode(versions[1]["wrapped_master_key"])
    aad = b'["parquet-keytools keystore", 1, "master key", "a", 2]'
    assert len(AESGCM(expand("wrap")).decrypt(wrapped[:12], wrapped[12:], aad)) == 32


def test_new_keystores_are_slow_to_guess(tmp_path: Path, scrypt_runs: list[int]) -> None:
    Keystore.create(tmp_path / "k", right)
    assert scrypt_runs == [2**17]
    scrypt = json.loads((tmp_path / "k").read_text())["scrypt"]
    assert (scrypt["n"], scrypt["r"], scrypt["p"]) == (2**17, 8, 1)


def test_only_the_owner_may_read_it(path: Path) -> None:
    Keystore(path, right).rotate_key("a")
    assert len(list(path.parent.iterdir())) == 2
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_a_umask_cannot_widen_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        create(tmp_path / "k", "a")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644])
def test_refuses_a_file_that_others_may_touch(path: Path, kms: KeystoreKms, mode: int) -> None:
    path.chmod(mode)
    for call in (
        lambda: wrap_one(kms, KEY, "a"),
        kms.master_key_ids,
        lambda: Keystore(path, right).rotate_key("a"),
    ):
        with pytest.raises(KmsConfigurationError, match="others than its owner") as caught:
            call()
        assert f"chmod 600 '{path}'" in caught.value.hint
    path.chmod(0o400)
    wrap_one(kms, KEY, "a")


def test_a_missing_file_says_how_to_create_it(tmp_path: Path) -> None:
    kms = KeystoreKms(tmp_path / "none.json", right)
    for call in (lambda: wrap_one(kms, KEY, "a"), kms.master_key_ids, lambda: kms.describe("a")):
        with pytest.raises(KmsConfigurationError, match="there is no file") as caught:
            call()
        assert "keystore create-key NAME --path" in caught.value.hint


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir(mode=0o700)
    mistakes = {
        "pipe": "not a regular file",
        "folder": "not a regular file|directory",
        "pipe/x": "cannot be opened",
    }
    for name, words in mistakes.items():
        with pytest.raises(KmsConfigurationError, match=f"{name}.*({words})"):
            Keystore(tmp_path / name, right).open()


def test_a_failing_file_system_is_worth_a_retry(path: Path, kms: KeystoreKms) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KmsUnavailableError) as caught:
        patch.setattr(private_file.os, "fstat", fail)
        wrap_one(kms, KEY, "a")
    assert "Input/output error" in str(caught.value)


def test_is_not_created_over_another(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(KmsConfigurationError, match="exists already"):
        create(path)
    assert path.read_bytes() == before
    assert shape(Keystore.create(path, right, exist_ok=True)) == {"a": [(1, True), (2, True)], "b": [(1, True)]}


@pytest.mark.parametrize("passphrase", ["short", "", "1234567"])
def test_a_new_passphrase_is_not_short(path: Path, tmp_path: Path, passphrase: str) -> None:
    def source() -> SecretBytes:
        return SecretBytes(passphrase.encode())

    with pytest.raises(KmsConfigurationError, match="at least 8"):
        Keystore.create(tmp_path / "new", source)
    assert not (tmp_path / "new").exists()
    with pytest.raises(KmsConfigurationError, match="at least 8"):
        Keystore(path, right).change_passphrase(source)
    assert shape(Keystore(path, right))


def test_a_link_stays_a_link(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    Keystore(link, right).create_key("c")
    assert link.is_symlink()
    assert Keystore(path, right).master_key_ids() == {"a", "b", "c"}


def test_writing_where_one_may_not(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be changed"):
        create(tmp_path / "no" / "such" / "folder")


# --- attacks on the file ---


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def rename(document: dict[str, Any], old: str, new: str) -> None:
    document["master_keys"][new] = document["master_keys"].pop(old)


def swap(document: dict[str, Any], one: tuple[str, int], two: tuple[str, int]) -> None:
    first = document["master_keys"][one[0]]["versions"][one[1]]
    second = document["master_keys"][two[0]]["versions"][two[1]]
    field = "wrapped_master_key"
    first[field], second[field] = second[field], first[field]


def put(*place: Any) -> Callable[[dict[str, Any]], None]:
    """Set a value in the document: the last argument, at the path before it."""
    *names, last, value = place

    def change(document: dict[str, Any]) -> None:
        part: Any = document
        for name in names:
            part = part[name]
        part[last] = value

    return change


def flip(text: str) -> str:
    data = bytearray(base64.b64decode(text))
    data[0] ^= 1
    return base64.b64encode(data).decode()


TAMPERINGS: dict[str, Callable[[dict[str, Any]], object]] = {
    "enable a key": put("master_keys", "b", "enabled", True),
    "disable a key": put("master_keys", "a", "enabled", False),
    "disable a version": put("master_keys", "a", "versions", 0, "enabled", False),
    "rename a key": lambda d: rename(d, "a", "x"),
    "rename two keys": lambda d: (rename(d, "a", "x"), rename(d, "b", "a"), rename(d, "x", "b")),
    "swap two keys": lambda d: swap(d, ("a", 0), ("b", 0)),
    "swap two versions": lambda d: swap(d, ("a", 0), ("a", 1)),
    "drop the last version": lambda d: d["master_keys"]["a"]["versions"].pop(),
    "drop the first version": lambda d: d["master_keys"]["a"]["versions"].pop(0),
    "drop all versions": put("master_keys", "a", "versions", []),
    "repeat a version": lambda d: d["master_keys"]["a"]["versions"].append(
        d["master_keys"]["a"]["versions"][0]
    ),
    "reverse versions": lambda d: d["master_keys"]["a"]["versions"].reverse(),
    "drop a key": lambda d: d["master_keys"].pop("b"),
    "copy a key": lambda d: d["master_keys"].update(c=d["master_keys"]["b"]),
    "change a wrapped key": lambda d: put("master_keys", "b", "versions", 0, "wrapped_master_key", flip(
        d["master_keys"]["b"]["versions"][0]["wrapped_master_key"]))(d),
    "change a time": put("master_keys", "a", "versions", 0, "created", "2020-01-01T00:00:00Z"),
    "change a time to none": put("master_keys", "a", "versions", 0, "created", "yesterday"),
    "change the mac": lambda d: d.update(mac=flip(d["mac"])),
    "shorten the mac": lambda d: d.update(mac="AAAA"),
    "empty the mac": lambda d: d.update(mac=""),
    "drop the mac": lambda d: d.pop("mac"),
    "add a field": put("note", "x"),
    "add a field to a key": put("master_keys", "a", "note", "x"),
    "one for true": put("master_keys", "a", "enabled", 1),
    "text for a version": put("master_keys", "a", "versions", 0, "version", "1"),
    "another format": put("format", "keystore"),
    "a later format version": put("format_version", 2),
    "an empty name": lambda d: rename(d, "a", ""),
    "control characters in a name": lambda d: rename(d, "a", "\x1b[2J"),
    "a scrypt n of one": put("scrypt", "n", 1),
    "a scrypt n that is no power of two": put("scrypt", "n", 2**15 + 1),
    "no salt": put("scrypt", "salt", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", TAMPERINGS)
def test_tampering_is_found(path: Path, name: str) -> None:
    Keystore(path, right).set_enabled("b", False)
    edit(path, lambda _: None)
    assert shape(Keystore(path, right)), "an edit that changes nothing but white space does no harm"
    edit(path, TAMPERINGS[name])
    for call in (
        lambda: Keystore(path, right).open(),
        lambda: Keystore(path, right).create_key("new"),
        lambda: wrap_one(KeystoreKms(path, right), KEY, "a"),
        lambda: KeystoreKms(path, right).describe("a"),
    ):
        with pytest.raises(KmsResponseInvalidError) as caught:
            call()
        assert "backup" in caught.value.hint


@pytest.mark.parametrize("name", TAMPERINGS)
def test_tampering_is_found_by_a_client_that_runs(path: Path, name: str) -> None:
    Keystore(path, right).set_enabled("b", False)
    kms = KeystoreKms(path, right)
    wrap_one(kms, KEY, "a")
    edit(path, TAMPERINGS[name])
    with pytest.raises(KmsResponseInvalidError, match=r"was altered|is not a keystore") as caught:
        wrap_one(kms, KEY, "a")
    assert "from a backup" in caught.value.hint


def test_every_single_byte_counts(path: Path) -> None:
    """A flipped bit is detected, unless it is in white space between tokens."""
    good = path.read_bytes()
    expected = shape(Keystore(path, right))
    keystore = Keystore(path, right)
    for place in range(0, len(good), 3):
        path.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
        try:
            assert shape(keystore) == expected
        except (KmsResponseInvalidError, KmsConfigurationError):
            continue
        assert good[place : place + 1].isspace()


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000, b"9" * 10_000, b'{"n": NaN}'],
)
def test_what_is_no_keystore(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    for call in (Keystore(path, right).open, KeystoreKms(path, right).master_key_ids):
        with pytest.raises(KmsResponseInvalidError, match="is not a keystore that can be read here"):
            call()


def test_a_huge_file_is_not_read(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(KmsConfigurationError, match="longer than"):
        Keystore(path, right).open()


@pytest.mark.parametrize(
    ("n", "r", "p"),
    [(2**40, 8, 1), (2**17, 2**20, 1), (2**17, 8, 2**20), (2**19, 8, 2), (2**62, 2**30, 2**30), (2**18, 32, 1)],
)
def test_hostile_scrypt_parameters_cost_nothing(
    path: Path, scrypt_runs: list[int], n: int, r: int, p: int
) -> None:
    edit(path, lambda document: document["scrypt"].update(n=n, r=r, p=p))
    with pytest.raises(KmsResponseInvalidError, match="memory and time"):
        Keystore(path, right).open()
    assert scrypt_runs == []


def test_the_most_that_scrypt_may_cost() -> None:
    """At most 512 MiB, and four times the work of a new keystore."""
    salt = keystore_file.ScryptParameters.fresh().salt
    most = keystore_file.ScryptParameters(n=2**19, r=8, p=1, salt=salt)
    assert 128 * most.n * most.r == 512 * 2**20
    assert most.n == 4 * keystore_file.DEFAULT_SCRYPT_N


def test_a_changed_salt_or_check_looks_like_a_wrong_passphrase(path: Path) -> None:
    edit(path, lambda document: document["scrypt"].update(salt=flip(document["scrypt"]["salt"])))
    with pytest.raises(KmsConfigurationError, match="passphrase") as caught:
        Keystore(path, right).open()
    assert "backup" in caught.value.hint


def test_a_wrong_passphrase_is_told_from_a_damaged_file(path: Path) -> None:
    for call in (lambda: Keystore(path, wrong).open(), lambda: wrap_one(KeystoreKms(path, wrong), KEY, "a")):
        with pytest.raises(KmsConfigurationError, match="the passphrase does not belong to"):
            call()
    before = path.read_bytes()
    for change in (
        lambda: Keystore(path, wrong).create_key("c"),
        lambda: Keystore(path, wrong).change_passphrase(wrong),
    ):
        with pytest.raises(KmsConfigurationError, match="the passphrase does not belong to"):
            change()
    assert path.read_bytes() == before


def test_a_wrong_passphrase_costs_one_run_of_scrypt(path: Path, scrypt_runs: list[int]) -> None:
    kms = KeystoreKms(path, wrong)
    outcomes = kms.unwrap_many([UnwrapRequest(f"keystore:v1:{number}", "a") for number in range(20)])
    assert [type(outcome) for outcome in outcomes] == [KmsConfigurationError] * 20
    assert len(scrypt_runs) == 1


# --- changes ---


def test_keys_and_versions(path: Path) -> None:
    keystore = Keystore(path, right)
    assert keystore.rotate_key("b") == 2
    assert keystore.rotate_key("b") == 3
    keystore.set_enabled("b", False, 2)
    keystore.set_enabled("a", False)
    assert shape(keystore) == {
        "a": [(1, False), (2, False)],
        "b": [(1, True), (2, False), (3, True)],
    }
    keystore.set_enabled("a", True)
    keystore.set_enabled("b", True, 2)
    assert shape(Keystore(path, right))["b"] == [(1, True), (2, True), (3, True)]
    opened = keystore.open()
    keys = [opened.key("b", version).reveal() for version in opened.master_keys["b"].versions]
    assert len(set(keys)) == 3


def test_enabling_a_key_leaves_its_disabled_versions_disabled(path: Path) -> None:
    keystore = Keystore(path, right)
    keystore.set_enabled("a", False, 1)
    keystore.set_enabled("a", False)
    keystore.set_enabled("a", True)
    assert shape(keystore)["a"] == [(1, False), (2, True)]


def test_what_cannot_be_changed(path: Path) -> None:
    keystore = Keystore(path, right)
    before = path.read_bytes()
    with pytest.raises(KmsConfigurationError, match="already"):
        keystore.create_key("a")
    for name in ("", " a", "a\n", "x" * 257, "\ud800", "\x1b[2J"):
        with pytest.raises(KmsConfigurationError, match="printable"):
            keystore.create_key(name)
    for call in (keystore.rotate_key, lambda name: keystore.set_enabled(name, False)):
        with pytest.raises(MasterKeyNotFoundError, match="update with master key 'none'"):
            call("none")
    for version in (0, 3, -1):
        with pytest.raises(MasterKeyNotFoundError, match=r"update with master key 'a'.* no version"):
            keystore.set_enabled("a", False, version)
    assert path.read_bytes() == before
    keystore.create_key("x" * 256)


def test_a_master_key_in_the_place_of_another_one(path: Path) -> None:
    """Anyone with the passphrase can put it there by mistake: the document is authentic."""
    opened = Keystore(path, right).open()
    of_b = opened.master_keys["b"]
    sealed = KeystoreDocument.sealed({"a": of_b, "b": of_b}, opened.document.scrypt, opened.keys)
    path.write_bytes(sealed.to_bytes())
    kms = KeystoreKms(path, right)
    with pytest.raises(KmsResponseInvalidError, match="version 1 of 'a' was altered, or is damaged"):
        wrap_one(kms, KEY, "a")
    assert unwrap_one(kms, wrap_one(kms, KEY, "b"), "b") == KEY


def test_another_passphrase(path: Path) -> None:
    kms = KeystoreKms(path, right)
    wrapped = wrap_one(kms, KEY, "a")
    keystore = Keystore(path, right)
    before = shape(keystore)
    old = json.loads(path.read_text())
    keystore.change_passphrase(wrong)
    new = json.loads(path.read_text())
    assert shape(keystore) == shape(Keystore(path, wrong)) == before
    assert unwrap_one(KeystoreKms(path, wrong), wrapped, "a") == KEY
    with pytest.raises(KmsConfigurationError, match="the passphrase does not belong to"):
        unwrap_one(kms, wrapped, "a")
    assert old["scrypt"]["salt"] != new["scrypt"]["salt"]
    assert old["master_keys"]["a"]["versions"][0]["created"] == new["master_keys"]["a"]["versions"][0]["created"]


# --- crashes ---

CALLS = ("open", "fdopen", "fchown", "fsync", "replace", "unlink", "close")


class Sabotage:
    """Stops an update before one of its system calls, each call in turn."""

    def __init__(self, turn: int, stop: Callable[[], object]) -> None:
        self.turn = turn
        self.stop = stop
        self.calls = 0

    def event(self) -> None:
        self.calls += 1
        if self.calls == self.turn:
            self.stop()

    @contextmanager
    def applied(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, self._wrapped(name, getattr(os, name)))
            yield

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if name != "close":  # it closes even when it fails
                self.event()
            result = real(*arguments, **named)
            if name == "close":
                self.event()
            if name == "fdopen":
                write = result.write
                result = HalfWriter(result, write, self.event)
            return result

        return call


class HalfWriter:
    """A file whose write is two writes, and may stop in between."""

    def __init__(self, file: Any, write: Callable[[bytes], int], event: Callable[[], None]) -> None:
        self.file, self._write, self._event = file, write, event

    def __enter__(self) -> "HalfWriter":
        return self

    def __exit__(self, *details: object) -> None:
        self.file.__exit__(*details)

    def write(self, content: bytes) -> None:
        self._write(content[: len(content) // 2])
        self.file.flush()
        self._event()
        self._write(content[len(content) // 2 :])

    def flush(self) -> None:
        self._event()
        self.file.flush()


UPDATES: dict[str, Callable[[Path], object]] = {
    "create": lambda path: create(path.with_name("created.json")),
    "rotate-key": lambda path: Keystore(path, right).rotate_key("a"),
    "disable": lambda path: Keystore(path, right).set_enabled("a", False),
    "change-passphrase": lambda path: Keystore(path, right).change_passphrase(wrong),
}


def state(path: Path) -> object:
    """The contents that an update may change; raises if a keystore there cannot be opened."""
    created = path.with_name("created.json")
    if created.exists():
        shape(Keystore(created, right))
    try:
        return created.exists(), "old passphrase", shape(Keystore(path, right))
    except KmsConfigurationError:
        return created.exists(), "new passphrase", shape(Keystore(path, wrong))


def copies(path: Path, folder: Path) -> Path:
    folder.mkdir()
    copy = folder / path.name
    copy.write_bytes(path.read_bytes())
    copy.chmod(0o600)
    return copy


def check_after_a_crash(copy: Path, old: object, new: object) -> None:
    now = state(copy)
    assert now in (old, new)
    passphrase = right if "old passphrase" in now else wrong  # type: ignore[operator]
    Keystore(copy, passphrase).create_key("after")
    assert "after" in shape(Keystore(copy, passphrase))
    Keystore.create(copy.with_name("created.json"), right, exist_ok=True, scrypt_n=FAST).create_key("x")
    names = {file.name for file in copy.parent.iterdir()}
    assert names == {"keystore.json", ".keystore.json.lock", "created.json", ".created.json.lock"}


@pytest.mark.parametrize("update", UPDATES)
def test_a_failure_at_any_point_leaves_the_old_or_the_new_state(path: Path, tmp_path: Path, update: str) -> None:
    old = state(path)
    complete = copies(path, tmp_path / "complete")
    counting = Sabotage(0, lambda: None)
    with counting.applied():
        UPDATES[update](complete)
    new = state(complete)
    assert old != new
    assert counting.calls >= 10

    def fail() -> None:
        raise OSError(28, "No space left on device")

    failed = 0
    turns = sample(range(1, counting.calls + 1), 3, list(UPDATES).index(update))
    for turn in turns:
        copy = copies(path, tmp_path / f"fail{turn}")
        with Sabotage(turn, fail).applied():
            try:
                UPDATES[update](copy)
            except (OutputError, KmsUnavailableError) as error:
                failed += 1
                assert "No space left" in str(error)
        check_after_a_crash(copy, old, new)
    assert failed >= len(turns) - 1


@pytest.mark.parametrize("update", UPDATES)
def test_a_kill_at_any_point_leaves_the_old_or_the_new_state(path: Path, tmp_path: Path, update: str) -> None:
    old = state(path)
    complete = copies(path, tmp_path / "complete")
    counting = Sabotage(0, lambda: None)
    with counting.applied():
        UPDATES[update](complete)
    new = state(complete)
    outcomes = []
    # The last one is not killed.
    for turn in sample(range(1, counting.calls + 2), 6, list(UPDATES).index(update)):
        copy = copies(path, tmp_path / f"kill{turn}")
        child = os.fork()
        if child == 0:
            try:
                with Sabotage(turn, lambda: os._exit(9)).applied():
                    UPDATES[update](copy)
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == (9 if turn <= counting.calls else 0)
        outcomes.append(state(copy) == new)
        check_after_a_crash(copy, old, new)
    # Old until the rename, new from there on.
    assert outcomes == sorted(outcomes)
    assert outcomes[0] is False and outcomes[-1] is True


def test_content_is_on_disk_before_its_name_and_the_name_before_it_is_done(path: Path) -> None:
    """The calls that protect against a power failure, in order."""
    done: list[str] = []
    lengths: list[int] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        done.append("folder" if stat.S_ISDIR(status.st_mode) else "content")
        lengths.append(status.st_size)
        real_fsync(descriptor)

    def replace(*arguments: Any, **named: Any) -> None:
        done.append("name")
        real_replace(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "replace", replace)
        Keystore(path, right).rotate_key("a")
    assert done == ["content", "name", "folder"]
    # All of it, with nothing left in a buffer.
    assert lengths[0] == path.stat().st_size


def test_a_disk_that_is_full_keeps_nothing_of_what_was_begun(path: Path) -> None:
    before = path.read_bytes()
    for too in ((), ("unlink",)):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(OutputError, match="No space left"):
            patch.setattr(os, "fsync", full_disk)
            for name in too:
                patch.setattr(os, name, read_only)
            Keystore(path, right).rotate_key("a")
        assert path.read_bytes() == before
        left = {file.name for file in path.parent.iterdir()} - {path.name, f".{path.name}.lock"}
        assert left == ({f".{path.name}.new"} if too else set())


def full_disk(*_: object) -> None:
    raise OSError(28, "No space left on device")


def read_only(path: str, **_: object) -> None:
    raise OSError(30, "Read-only file system") if os.path.exists(path) else FileNotFoundError(path)  # noqa: PTH110


def test_who_changes_a_keystore_leaves_it_to_its_owner(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example root, who rotates the keys of a service."""
    if os.geteuid() == 0:
        os.chown(path, 12_345, 12_346)
    given: list[tuple[int, int]] = []
    fchown = os.fchown

    def noted(descriptor: int, *owner: int) -> None:
        given.append((owner[0], owner[1]))
        fchown(descriptor, *owner)

    monkeypatch.setattr(os, "fchown", noted)
    expected = (path.stat().st_uid, path.stat().st_gid)
    Keystore(path, right).rotate_key("a")
    assert given == [expected] == [(path.stat().st_uid, path.stat().st_gid)]


# --- many processes ---


def change_a_lot(path: str, number: int) -> None:
    keystore = Keystore(Path(path), right)
    for turn in range(8):
        keystore.create_key(f"key-{number}-{turn}")
        keystore.rotate_key("a")
        keystore.set_enabled(f"key-{number}-{turn}", False)


def test_four_processes_lose_nothing(path: Path) -> None:
    # With all imports done, and the keys that were derived from the passphrase.
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=change_a_lot, args=(str(path), number)) for number in range(4)]
    for process in processes:
        process.start()
    kms = KeystoreKms(path, right)
    wrapped = wrap_one(kms, KEY, "b")
    reads = 0
    while any(process.is_alive() for process in processes):
        assert unwrap_one(kms, wrapped, "b") == KEY, "a reader sees no moment without a keystore"
        reads += 1
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    after = shape(Keystore(path, right))
    expected = {f"key-{number}-{turn}" for number in range(4) for turn in range(8)}
    assert set(after) == {"a", "b"} | expected
    assert after["a"] == [(version, True) for version in range(1, 35)]
    assert all(after[name] == [(1, False)] for name in expected)
    assert reads > 10


def test_a_lock_that_stays_is_an_error_and_not_a_hang(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (path.parent / f".{path.name}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with (
            pytest.raises(TimeoutError, match=r"another process has held .* for 0\.1 seconds"),
            private_file.exclusive_lock(path, timeout_seconds=0.1),
        ):
            pass
        # Readers do not wait for writers.
        assert shape(Keystore(path, right))
        monkeypatch.setattr(
            keystore_file, "exclusive_lock", partial(private_file.exclusive_lock, timeout_seconds=0.1)
        )
        with pytest.raises(OutputError, match=r"cannot be changed: another process has held .* for 0\.1 seconds"):
            Keystore(path, right).create_key("c")
    with private_file.exclusive_lock(path, timeout_seconds=0.1):
        pass


@pytest.mark.parametrize("update", ["create_key", "rotate_key"])
def test_what_would_be_too_long_to_be_read_is_not_written(
    path: Path, monkeypatch: pytest.MonkeyPatch, update: str
) -> None:
    """Otherwise, all master keys in it would be lost."""
    keystore, before = Keystore(path, right), path.read_bytes()
    monkeypatch.setattr(keystore_file, "MAX_FILE_LENGTH", len(before))
    with pytest.raises(KmsConfigurationError, match="could not be read"):
        getattr(keystore, update)("c" if update == "create_key" else "a")
    assert path.read_bytes() == before and shape(keystore)
    # A name of the maximum length is written.
    keystore.set_enabled("a", True)
    assert shape(Keystore(path, right))


# --- the client ---


def test_scrypt_runs_once_and_changes_are_seen_at_once(path: Path, scrypt_runs: list[int]) -> None:
    kms = KeystoreKms(path, right)
    operator = Keystore(path, right)
    assert scrypt_runs == [], "nothing is opened before it is used"
    wrapped = wrap_one(kms, KEY, "a")
    assert kms.wrapped_key_version(wrapped, "a") == "2"
    for _ in range(50):
        assert unwrap_one(kms, wrapped, "a") == KEY
    assert len(scrypt_runs) == 1
    operator.rotate_key("a")
    assert kms.wrapped_key_version(wrap_one(kms, KEY, "a"), "a") == "3"
    operator.set_enabled("a", False, 2)
    with pytest.raises(MasterKeyDisabledError, match="version 2"):
        unwrap_one(kms, wrapped, "a")
    assert kms.describe("a").enabled
    operator.set_enabled("a", False)
    with pytest.raises(MasterKeyDisabledError, match=r"the master key is disabled\. Enable"):
        wrap_one(kms, KEY, "a")
    assert not kms.describe("a").enabled
    operator.set_enabled("a", True)
    operator.create_key("c")
    wrap_one(kms, KEY, "c")
    assert len(scrypt_runs) == 2, "one each for the client and the operator"


def test_a_disabled_current_version_does_not_wrap_with_an_older_one(path: Path, kms: KeystoreKms) -> None:
    Keystore(path, right).set_enabled("a", False, 2)
    with pytest.raises(MasterKeyDisabledError, match="version 2"):
        wrap_one(kms, KEY, "a")
    assert not kms.describe("a").enabled


def test_a_keystore_that_disappears_is_not_used_from_memory(path: Path, kms: KeystoreKms) -> None:
    wrap_one(kms, KEY, "a")
    path.rename(path.with_name("elsewhere"))
    with pytest.raises(KmsConfigurationError, match="there is no file"):
        wrap_one(kms, KEY, "a")
    path.with_name("elsewhere").rename(path)
    wrap_one(kms, KEY, "a")


def test_the_version_in_a_wrapped_key_is_authenticated(path: Path, kms: KeystoreKms) -> None:
    wrapped = wrap_one(kms, KEY, "a")
    assert wrapped.startswith("keystore:v2:")
    for forged in ("v1", "v3", "v02", "v0", "v999999999", "v9999999999", "v٢"):
        with pytest.raises(WrappedKeyInvalidError, match="unwrap with master key 'a'"):
            unwrap_one(kms, wrapped.replace("v2", forged), "a")


def test_the_aad_of_a_wrapped_key(path: Path, kms: KeystoreKms) -> None:
    opened = Keystore(path, right).open()
    master_key = opened.key("a", opened.master_keys["a"].versions[1])
    text = wrap_one(kms, KEY, "a").removeprefix("keystore:v2:")
    aad = b'["parquet-keytools keystore", 1, "wrapped key", "a", 2]'
    assert unwrap_key(master_key, text, aad) == KEY
    for other in (b"", aad.replace(b'"a"', b'"b"'), aad.replace(b"2", b"1"), aad.replace(b"wrapped", b"master")):
        with pytest.raises(InvalidTag):
            unwrap_key(master_key, text, other)


def test_a_key_wrapped_by_the_keystore_of_another_is_refused(tmp_path: Path, kms: KeystoreKms) -> None:
    create(tmp_path / "other", "a").rotate_key("a")
    with pytest.raises(WrappedKeyInvalidError, match="unwrap with master key 'a'"):
        unwrap_one(kms, wrap_one(KeystoreKms(tmp_path / "other", right), KEY, "a"), "a")


def test_names_are_known_without_the_passphrase(path: Path) -> None:
    def never() -> SecretBytes:
        raise AssertionError

    assert KeystoreKms(path, never).master_key_ids() == {"a", "b"}


def test_settings(path: Path) -> None:
    folder = path.parent
    (folder / "passphrase").write_text(PASSPHRASE + "\n")
    (folder / "passphrase").chmod(0o600)
    for given in ({"passphrase": PASSPHRASE}, {"passphrase_file": "passphrase"}):
        settings = KeystoreSettings.model_validate({"type": "keystore", "path": "keystore.json", **given})
        assert PASSPHRASE not in repr(settings) + settings.model_dump_json()
        kms = KeystoreKms.from_settings(settings, folder)
        assert unwrap_one(kms, wrap_one(kms, KEY, "a"), "a") == KEY
        keystore = Keystore(*settings.located(folder))
        keystore.open()
        assert PASSPHRASE not in repr(vars(keystore)) + repr(vars(kms))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"passphrase": PASSPHRASE, "passphrase_file": "f"},
        {"passphrase": None},
        {"passphrase": 5},
        {"pass": PASSPHRASE},
    ],
)
def test_exactly_one_passphrase(given: dict[str, object]) -> None:
    with pytest.raises(ValidationError) as caught:
        KeystoreSettings.model_validate({"path": "k", **given})
    assert PASSPHRASE not in str(caught.value)


def test_a_passphrase_file_is_read_when_it_is_needed(path: Path) -> None:
    settings = KeystoreSettings(path=path, passphrase_file=Path("late"))
    kms = KeystoreKms.from_settings(settings, path.parent)
    with pytest.raises(KmsConfigurationError, match="there is no file"):
        wrap_one(kms, KEY, "a")
    (path.parent / "late").write_text(PASSPHRASE)
    (path.parent / "late").chmod(0o640)
    with pytest.raises(KmsConfigurationError, match="others than its owner") as caught:
        wrap_one(kms, KEY, "a")
    assert "chmod 600" in caught.value.hint
    (path.parent / "late").chmod(0o600)
    assert unwrap_one(kms, wrap_one(kms, KEY, "a"), "a") == KEY


@pytest.mark.parametrize(
    ("content", "passphrase"),
    [
        (b"abc", b"abc"),
        (b"abc\n", b"abc"),
        (b"abc\n\n", b"abc\n"),
        (b" a\xff ", b" a\xff "),
        (b"x" * 4096, b"x" * 4096),
    ],
)
def test_one_newline_is_not_part_of_a_passphrase(tmp_path: Path, content: bytes, passphrase: bytes) -> None:
    file = tmp_path / "p"
    file.touch(0o600)
    file.write_bytes(content)
    assert passphrase_from_file(file).reveal() == passphrase
    if not passphrase.endswith(b"\n"):
        assert passphrase_from_text(os.fsdecode(passphrase)).reveal() == passphrase


@pytest.mark.parametrize("content", [b"", b"\n", b"x" * 4097, b"x" * 5000])
def test_passphrases_that_are_none(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "p"
    file.touch(0o600)
    file.write_bytes(content)
    with pytest.raises(KmsConfigurationError, match=r"empty, longer than 4096 bytes|is longer than 4097 bytes"):
        passphrase_from_file(file)
    if content != b"\n":
        with pytest.raises(KmsConfigurationError, match="the passphrase is empty, longer than 4096 bytes"):
            passphrase_from_text(content.decode())


def test_text_that_has_no_bytes_is_not_shown() -> None:
    with pytest.raises(KmsConfigurationError) as caught:
        passphrase_from_text("canary\ud800")
    assert caught.value.__context__ is None


def test_no_error_shows_a_secret(path: Path, kms: KeystoreKms) -> None:
    """Neither the passphrase, nor master keys, nor keys derived from the passphrase."""
    opened = Keystore(path, right).open()
    secrets = [PASSPHRASE.encode(), opened.keys.wrap.reveal(), opened.keys.mac.reveal()]
    secrets += [opened.key("a", version).reveal() for version in opened.master_keys["a"].versions]
    errors: list[KeytoolsError] = []

    def collect(call: Callable[[], object]) -> None:
        with pytest.raises(KeytoolsError) as caught:
            call()
        errors.append(caught.value)

    wrapped = wrap_one(kms, KEY, "a")
    collect(lambda: wrap_one(kms, KEY, "none"))
    collect(lambda: unwrap_one(kms, wrapped, "b"))
    collect(lambda: unwrap_one(kms, wrapped[:-5], "a"))
    collect(lambda: Keystore(path, right).create_key("a"))
    collect(lambda: Keystore(path, right).set_enabled("a", True, 9))
    collect(lambda: Keystore(path, wrong).open())
    edit(path, put("master_keys", "a", "enabled", False))
    collect(lambda: wrap_one(kms, KEY, "a"))
    collect(lambda: Keystore(path, right).open())
    path.write_text("{")
    collect(lambda: Keystore(path, right).open())
    for error in errors:
        text = "".join(traceback.format_exception(error)) + repr(error) + repr(error.__dict__)
        frames = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), capture_locals=True)
        text += repr([frame.locals for frame in frames if "parquet_keytools" in frame.filename])
        for secret in secrets:
            spellings = (secret.hex(), base64.b64encode(secret).decode(), repr(secret)[2:-1])
            assert not any(spelling in text for spelling in spellings), error
    assert not any(repr(secret)[2:-1] in repr(opened) for secret in secrets)


def test_two_wraps_share_no_nonce() -> None:
    texts = {wrap_key(SecretBytes(bytes(32)), KEY, b"")[:16] for _ in range(1000)}
    assert len(texts) == 1000


# --- texts of errors and descriptions ---

CLIENT_CALLS: list[tuple[str, Callable[[KeystoreKms, str], object]]] = [
    ("wrap", lambda kms, name: wrap_one(kms, KEY, name)),
    ("wrap", lambda kms, name: kms.wrap_raw(KEY, name)),
    ("unwrap", lambda kms, name: unwrap_one(kms, f"keystore:v1:{'A' * 60}", name)),
    ("unwrap", lambda kms, name: kms.unwrap_raw(bytes(60), name)),
    ("describe", lambda kms, name: kms.describe(name)),
]


@pytest.mark.parametrize(("operation", "call"), CLIENT_CALLS)
def test_errors_name_the_operation_and_the_master_key(
    path: Path, operation: str, call: Callable[[KeystoreKms, str], object]
) -> None:
    with pytest.raises(MasterKeyNotFoundError) as caught:
        call(KeystoreKms(path, right), "nobody")
    facts = (caught.value.backend, caught.value.operation, caught.value.master_key_id)
    assert facts == ("keystore", operation, "nobody")


def test_a_disabled_master_key_names_the_operation(path: Path) -> None:
    kms = KeystoreKms(path, right)
    wrapped, raw = wrap_one(kms, KEY, "b"), kms.wrap_raw(KEY, "b")
    Keystore(path, right).set_enabled("b", False)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("wrap", lambda: wrap_one(kms, KEY, "b")),
        ("wrap", lambda: kms.wrap_raw(KEY, "b")),
        ("unwrap", lambda: unwrap_one(kms, wrapped, "b")),
        ("unwrap", lambda: kms.unwrap_raw(raw, "b")),
    ]
    for operation, call in calls:
        with pytest.raises(MasterKeyDisabledError) as caught:
            call()
        assert (caught.value.operation, caught.value.master_key_id) == (operation, "b")


def test_a_keystore_that_is_not_there_cannot_be_listed(tmp_path: Path) -> None:
    with pytest.raises(KmsConfigurationError) as caught:
        KeystoreKms(tmp_path / "none.json", right).master_key_ids()
    assert (caught.value.operation, caught.value.master_key_id) == ("connect", None)


def test_a_description_says_all_that_is_known(path: Path) -> None:
    assert KeystoreKms(path, right).describe("a") == MasterKeyDescription(
        "a", enabled=True, current_version="2", origin="keystore"
    )
