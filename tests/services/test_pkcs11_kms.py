"""The PKCS#11 client against SoftHSM: sessions, PINs, tokens that return, keys that an operator changes."""

from __future__ import annotations

import ctypes
import json
import logging
import multiprocessing
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pkcs11
import pytest
from pkcs11 import Attribute, KeyType, MechanismFlag, TokenFlag
from pydantic import ValidationError
from soak import SOAK, SecondForm
from softhsm import PIN, SoftHsm, needs_softhsm
from typer.testing import CliRunner

from parquet_keytools import cli
from parquet_keytools.errors import (
    KmsConfigurationError,
    KmsError,
    KmsResponseInvalidError,
    KmsThrottledError,
    KmsUnavailableError,
    MasterKeyDisabledError,
    MasterKeyNotFoundError,
    WrappedKeyInvalidError,
    value_or_raise,
)
from parquet_keytools.kms.client import KmsClient, UnwrapRequest, WrapRequest
from parquet_keytools.kms.contract_tests import KmsClientContract, rewrap_one, unwrap_one, wrap_one
from parquet_keytools.kms.pkcs11 import Pkcs11Kms, Pkcs11Settings
from parquet_keytools.secret_bytes import SecretBytes

pytestmark = [needs_softhsm, pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")]

KEY = SecretBytes(bytes(range(32)))
WRONG_PIN = "wrong-pin-not-to-be-shown"


@pytest.fixture
def hsm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SoftHsm:
    return SoftHsm(tmp_path, monkeypatch)


def client(hsm: SoftHsm, folder: Path = Path(), **settings: Any) -> Pkcs11Kms:
    return Pkcs11Kms.from_settings(Pkcs11Settings.model_validate(hsm.settings(**settings)), folder)


@pytest.fixture
def kms(hsm: SoftHsm) -> Iterator[Pkcs11Kms]:
    with client(hsm, timeout_seconds=10) as kms:
        kms.create_key("pii")
        yield kms


class TestPkcs11Contract(KmsClientContract):
    mechanism = "AES_GCM"

    @pytest.fixture
    def kms(self, hsm: SoftHsm) -> Iterator[KmsClient]:
        # Another client plays the operator.
        with client(hsm, mechanism=self.mechanism) as self.operator, client(hsm, mechanism=self.mechanism) as kms:
            for name in ("one", "one é:,; 1"):
                self.operator.create_key(name)
            yield kms

    @pytest.fixture
    def master_key_id(self) -> str:
        return "one"

    @pytest.fixture
    def other_master_key_id(self) -> str:
        return "one é:,; 1"

    def disable_key(self, kms: KmsClient, master_key_id: str) -> None:
        self.operator.set_enabled(master_key_id, False)

    def add_version(self, kms: KmsClient, master_key_id: str) -> None:
        self.operator.rotate_key(master_key_id)


class TestPkcs11ContractWithKeyWrap(SecondForm, TestPkcs11Contract):
    mechanism = "AES_KEY_WRAP"


# --- sessions ---


def test_32_threads_wrap_and_unwrap_thousands_of_keys(kms: Pkcs11Kms, hsm: SoftHsm) -> None:
    """Two clients share the library, which SoftHSM's own threads would crash; no nonce is used twice."""
    batches = 400 if SOAK else 100
    with client(hsm) as other:
        clients = [kms, other]

        def work(number: int) -> list[str]:
            mine = clients[number % 2]
            keys = [SecretBytes.random(256) for _ in range(25)]
            wrapped = [value_or_raise(each) for each in mine.wrap_many([WrapRequest(key, "pii") for key in keys])]
            assert mine.unwrap_many([UnwrapRequest(each, "pii") for each in wrapped]) == keys
            return wrapped

        with ThreadPoolExecutor(32) as pool:
            wrapped = [each for some in pool.map(work, range(batches)) for each in some]
    nonces = {each.partition("gcm:")[2][:16] for each in wrapped}
    assert len(nonces) == 25 * batches


def test_one_login_serves_all_clients_of_a_process(kms: Pkcs11Kms, hsm: SoftHsm) -> None:
    wrapped = wrap_one(kms, KEY, "pii")
    with client(hsm) as other:
        assert unwrap_one(other, wrapped, "pii") == KEY
    assert unwrap_one(kms, wrapped, "pii") == KEY
    token = pkcs11.lib(str(hsm.module)).get_token(token_label="keys")
    with pytest.raises(pkcs11.UserAlreadyLoggedIn):
        token.open(user_pin=PIN)
    kms.close()
    token.open(user_pin=PIN).close()
    assert unwrap_one(kms, wrapped, "pii") == KEY


class Limited:
    """A SoftHSM token with a limited number of sessions: SoftHSM itself has no limit."""

    def __init__(self, token: Any, limit: list[int]) -> None:
        self._token = token
        self._limit = limit

    def open(self, **options: Any) -> Any:
        if not self._limit[0]:
            raise pkcs11.SessionCount
        self._limit[0] -= 1
        return self._token.open(**options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._token, name)


class FakeLibrary:
    """SoftHSM, except for its tokens."""

    def __init__(self, path: str, change: Callable[[Any], Any]) -> None:
        self._library = _real_library(path)
        self._change = change

    def get_slots(self, token_present: bool) -> list[Any]:
        return [FakeSlot(slot, self._change) for slot in self._library.get_slots(token_present)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)


class FakeSlot:
    def __init__(self, slot: Any, change: Callable[[Any], Any]) -> None:
        self._slot = slot
        self._change = change

    def get_token(self) -> Any:
        return self._change(self._slot.get_token())


_real_library = pkcs11.lib


def fake_tokens(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    monkeypatch.setattr(pkcs11, "lib", lambda path: FakeLibrary(path, change))


def test_a_session_limit_is_waited_for(hsm: SoftHsm, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = [1]  # the login needs one
    fake_tokens(monkeypatch, lambda token: Limited(token, limit))
    with client(hsm, timeout_seconds=0.5) as kms, pytest.raises(KmsThrottledError, match="no session left"):
        wrap_one(kms, KEY, "pii")
    with client(hsm, timeout_seconds=20) as kms:
        limit[0] = 2
        kms.create_key("pii")
        limit[0] = 0
        threading.Timer(0.3, lambda: limit.__setitem__(0, 1)).start()
        assert wrap_one(kms, KEY, "pii")


class Busy:
    """A library that is thread-safe, unlike SoftHSM. It counts the calls in progress, and can lose its token."""

    def __init__(self) -> None:
        self.under_way = self.most_under_way = self.opened = self.started_over = 0
        self.lose = False
        self._lock = threading.Lock()

    def get_slots(self, token_present: bool) -> list[Any]:
        slot = SimpleNamespace(slot_id=1)
        slot.get_token = lambda: SimpleNamespace(
            label="keys", serial=b"1", flags=TokenFlag(0), slot=slot, open=self.open
        )
        return [slot]

    def finalize(self) -> None:
        assert not self.under_way, "sessions are in use"
        self.started_over += 1

    def initialize(self) -> None:
        assert not self.under_way, "sessions are in use"

    def open(self, **_: Any) -> Any:
        self.opened += 1
        return SimpleNamespace(get_objects=lambda _: [BusyKey(self)], close=lambda: None)

    def encrypt(self, data: bytes) -> bytes:
        with self._lock:
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            is_lost, self.lose = self.lose, False
        time.sleep(0.02)
        with self._lock:
            self.under_way -= 1
        if is_lost:
            raise pkcs11.DeviceRemoved
        return data + bytes(16)


class BusyKey(pkcs11.SecretKey):
    def __init__(self, library: Busy) -> None:
        self._library = library

    def get_attributes(self, wanted: Any) -> dict[Attribute, Any]:
        found: dict[Attribute, Any] = dict.fromkeys(wanted, True)
        return found | {
            Attribute.LABEL: "pii",
            Attribute.ID: b"\x01",
            Attribute.KEY_TYPE: KeyType.AES,
            Attribute.EXTRACTABLE: False,
        }

    def encrypt(self, data: bytes, **_: Any) -> bytes:
        return self._library.encrypt(data)


def test_as_many_sessions_as_allowed_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by two clients; and if the token is lost, the library starts over when no session is in use."""
    library = Busy()
    monkeypatch.setattr(pkcs11, "lib", lambda path: library)
    given = {"module": str(tmp_path / "busy.so"), "token_label": "keys", "pin": PIN, "max_sessions": 3}
    settings = Pkcs11Settings.model_validate(given)
    with Pkcs11Kms(settings) as kms, Pkcs11Kms(settings) as other, ThreadPoolExecutor(16) as pool:
        for lose in (False, True):
            library.lose = lose
            assert all(pool.map(lambda number: wrap_one((kms, other)[number % 2], KEY, "pii"), range(60)))
    assert (library.most_under_way, library.started_over) == (3, 1)
    # Three short ones and one that stays, and again after the token was lost.
    assert library.opened <= 8


# --- PINs ---


def pin_is_low(hsm: SoftHsm) -> bool:
    return TokenFlag.USER_PIN_COUNT_LOW in hsm.token().flags


def test_a_wrong_pin_is_tried_once(hsm: SoftHsm, tmp_path: Path) -> None:
    with client(hsm) as kms:
        kms.create_key("pii")
    with client(hsm, pin=WRONG_PIN) as kms, ThreadPoolExecutor(16) as pool:
        outcomes = list(pool.map(lambda _: kms.wrap_many([WrapRequest(KEY, "pii")])[0], range(64)))
        assert {type(outcome) for outcome in outcomes} == {KmsConfigurationError}
        assert pin_is_low(hsm)
        with hsm.operator():
            pass  # a correct PIN resets the count
        assert not pin_is_low(hsm)
        with pytest.raises(KmsConfigurationError, match="not tried again"):
            wrap_one(kms, KEY, "pii")
    # A new client of the same process, and a forked child, do not try it either.
    with client(hsm, pin=WRONG_PIN) as kms, pytest.raises(KmsConfigurationError, match="not tried again"):
        kms.describe("pii")
    assert in_child("fork", wraps, hsm.settings(pin=WRONG_PIN)) == "KmsConfigurationError"
    assert not pin_is_low(hsm)
    # Other settings do.
    with client(hsm) as kms:
        assert wrap_one(kms, KEY, "pii")


class Flagged:
    """A SoftHSM token with other flags: SoftHSM locks no PIN."""

    def __init__(self, token: Any, flag: TokenFlag) -> None:
        self._token = token
        self.flags = token.flags | flag

    def open(self, **_: Any) -> Any:
        raise AssertionError("a PIN was tried")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._token, name)


@pytest.mark.parametrize(
    ("flag", "what"),
    [(TokenFlag.USER_PIN_LOCKED, "locked"), (TokenFlag.USER_PIN_FINAL_TRY, "would lock the token")],
)
def test_no_pin_is_tried_that_could_lock_the_token(
    hsm: SoftHsm, monkeypatch: pytest.MonkeyPatch, flag: TokenFlag, what: str
) -> None:
    fake_tokens(monkeypatch, lambda token: Flagged(token, flag))
    with client(hsm) as kms, pytest.raises(KmsConfigurationError, match=what):
        wrap_one(kms, KEY, "pii")


def test_no_text_shows_a_pin(hsm: SoftHsm, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.DEBUG)
    texts: list[str] = []
    for pin in (PIN, WRONG_PIN):
        settings = Pkcs11Settings.model_validate(hsm.settings(pin=pin))
        with pytest.raises(TypeError, match="secret"):
            pickle.dumps(settings)
        with Pkcs11Kms(settings) as kms:
            for outcome in (
                *kms.wrap_many([WrapRequest(KEY, "none")]),
                *kms.unwrap_many([UnwrapRequest("x", "none")]),
            ):
                assert isinstance(outcome, KmsError)
                assert outcome.__context__ is None and outcome.__traceback__ is None
                texts += [str(outcome), repr(outcome), repr(vars(outcome)), str(pickle.dumps(outcome))]
            texts += [repr(kms), repr(settings), str(settings), repr(vars(kms))]
    with pytest.raises(ValidationError) as caught:
        Pkcs11Settings.model_validate(hsm.settings(pin_file="pin"))
    texts += [str(caught.value), caplog.text]
    assert not any(pin in text for text in texts for pin in (PIN, WRONG_PIN))


def test_a_pin_file_is_private(hsm: SoftHsm, tmp_path: Path) -> None:
    file = tmp_path / "pin"
    file.write_text(f"{PIN}\n")
    file.chmod(0o600)
    with client(hsm, tmp_path, pin=None, pin_file="pin") as kms:
        kms.create_key("pii")
        assert wrap_one(kms, KEY, "pii")
    file.chmod(0o640)
    with client(hsm, tmp_path, pin=None, pin_file="pin") as kms, pytest.raises(KmsConfigurationError) as caught:
        wrap_one(kms, KEY, "pii")
    assert "pkcs11: connect: wrong configuration: others than its owner" in str(caught.value)


@pytest.mark.parametrize(
    "wrong", [{"slot": 1}, {"token_label": None}, {"pin": None}, {"pin_file": "pin"}, {"mechanism": "RSA"}]
)
def test_settings_that_contradict_each_other(hsm: SoftHsm, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Pkcs11Settings.model_validate(hsm.settings(**wrong))


# --- tokens ---


def test_serial_and_slot_name_a_token(kms: Pkcs11Kms, hsm: SoftHsm) -> None:
    wrapped = wrap_one(kms, KEY, "pii")
    token = hsm.token()
    for name in ({"serial": token.serial.decode()}, {"slot": token.slot.slot_id}):
        with client(hsm, token_label=None, **name) as other:
            assert unwrap_one(other, wrapped, "pii") == KEY


def test_errors_name_the_tokens_that_there_are(hsm: SoftHsm) -> None:
    hsm.add_token("twice")
    hsm.add_token("twice")
    with client(hsm, token_label="kyes") as kms, pytest.raises(KmsConfigurationError) as caught:
        wrap_one(kms, KEY, "pii")
    assert (
        "there is no token with the label 'kyes'" in str(caught.value) and "'keys' (serial " in caught.value.hint
    )
    with (
        client(hsm, token_label="twice") as kms,
        pytest.raises(KmsConfigurationError, match="more than one") as caught,
    ):
        wrap_one(kms, KEY, "pii")
    assert "`serial`" in caught.value.hint


def test_a_module_that_cannot_be_loaded(hsm: SoftHsm, tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("no library")
    for name in ("text.so", "none.so"):
        with (
            client(hsm, tmp_path, module=name) as kms,
            pytest.raises(KmsConfigurationError, match="cannot be loaded") as caught,
        ):
            wrap_one(kms, KEY, "pii")
        assert str(tmp_path / name) in str(caught.value) and caught.value.hint and caught.value.tries == 1


def test_a_token_that_is_removed_and_returns(kms: Pkcs11Kms, hsm: SoftHsm, tmp_path: Path) -> None:
    wrapped = wrap_one(kms, KEY, "pii")
    away = hsm.folder_of_token.rename(tmp_path / "away")
    with client(hsm, timeout_seconds=0.5) as hasty:
        for outcome in (
            *hasty.unwrap_many([UnwrapRequest(wrapped, "pii")]),
            *hasty.wrap_many([WrapRequest(KEY, "pii")]),
        ):
            assert isinstance(outcome, KmsUnavailableError) and "token was removed" in str(outcome)
    # It returns while others wait.
    threading.Timer(0.3, lambda: away.rename(hsm.folder_of_token)).start()
    with ThreadPoolExecutor(8) as pool:
        assert set(map(bytes.hex, pool.map(lambda _: unwrap_one(kms, wrapped, "pii").reveal(), range(8)))) == {
            KEY.reveal().hex()
        }
    assert kms.describe("pii").enabled


# --- processes ---


def wraps(settings: dict[str, Any]) -> str:
    """Wrap and unwrap in a child; returns the wrapped key, or the name of the error."""
    with Pkcs11Kms(Pkcs11Settings.model_validate(settings)) as kms:
        outcome = kms.wrap_many([WrapRequest(KEY, "pii")])[0]
        if isinstance(outcome, KmsError):
            return type(outcome).__name__
        assert unwrap_one(kms, outcome, "pii") == KEY
        return outcome


def unwraps_with_the_clients_of_the_parent(wrapped: str) -> str:
    return unwrap_one(_parents_client[0], wrapped, "pii").reveal().hex()


_parents_client: list[Pkcs11Kms] = []


def in_child(method: str, work: Callable[[Any], str], argument: Any) -> str:
    with multiprocessing.get_context(method).Pool(1) as pool:
        return pool.apply_async(work, [argument]).get(60)


def test_fork_and_spawn(kms: Pkcs11Kms, hsm: SoftHsm) -> None:
    wrapped = wrap_one(kms, KEY, "pii")
    _parents_client[:] = [kms]
    stop = threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            wrap_one(kms, KEY, "pii")

    with ThreadPoolExecutor(2) as pool:
        busy = [pool.submit(keep_busy) for _ in range(2)]
        try:
            for _ in range(3):
                assert in_child("fork", unwraps_with_the_clients_of_the_parent, wrapped) == KEY.reveal().hex()
            from_child = in_child("spawn", wraps, hsm.settings())
        finally:
            stop.set()
        for each in busy:
            each.result()
    assert unwrap_one(kms, from_child, "pii") == unwrap_one(kms, wrapped, "pii") == KEY


# --- keys and versions ---


def make_key(hsm: SoftHsm, number: bytes, label: str = "made", **attributes: Any) -> None:
    template = {Attribute.SENSITIVE: True, Attribute.EXTRACTABLE: False}
    template |= {Attribute[name]: value for name, value in attributes.items()}
    with hsm.operator() as session:
        session.generate_key(
            attributes.pop("KEY_TYPE", KeyType.AES),
            256,
            id=number,
            label=label,
            store=True,
            capabilities=MechanismFlag.ENCRYPT | MechanismFlag.DECRYPT,
            template={name: value for name, value in template.items() if name != Attribute.KEY_TYPE},
        )


def test_the_highest_number_wraps_and_all_unwrap(kms: Pkcs11Kms, hsm: SoftHsm) -> None:
    wrapped = []
    for number, version in ((b"\x02", 2), (b"\x01", 2), (b"\x01\x00", 256), (b"\x00\x00\x00\x03", 256)):
        make_key(hsm, number)
        wrapped.append(wrap_one(kms, KEY, "made"))
        assert kms.wrapped_key_version(wrapped[-1], "made") == str(version)
    assert kms.unwrap_many([UnwrapRequest(each, "made") for each in wrapped]) == [KEY] * 4
    assert kms.describe("made").current_version == "256"
    assert kms.rotate_key("made") == 257
    assert rewrap_one(kms, wrapped[0], "made").startswith("pkcs11:v257:gcm:")
    # A version is proven: a wrapped key that names another one does not unwrap.
    for other in ("1", "9", "02"):
        with pytest.raises(WrappedKeyInvalidError):
            unwrap_one(kms, wrapped[0].replace("v2", f"v{other}"), "made")


def test_the_aad_is_the_master_key_id(kms: Pkcs11Kms, hsm: SoftHsm) -> None:
    make_key(hsm, b"\x01")
    wrapped = wrap_one(kms, KEY, "made")
    with hsm.operator() as session:
        (key,) = session.get_objects({Attribute.LABEL: "made"})
        key[Attribute.LABEL] = "renamed"
    with pytest.raises(WrappedKeyInvalidError):
        unwrap_one(kms, wrapped, "renamed")


@pytest.mark.parametrize("number", [b"", b"\x00", b"12345"])
def test_a_number_that_is_no_version_is_refused(kms: Pkcs11Kms, hsm: SoftHsm, number: bytes) -> None:
    make_key(hsm, number)
    with pytest.raises(KmsConfigurationError, match="CKA_ID"):
        wrap_one(kms, KEY, "made")


def test_two_keys_of_one_version_are_refused(kms: Pkcs11Kms, hsm: SoftHsm) -> None:
    make_key(hsm, b"\x01")
    wrapped = wrap_one(kms, KEY, "made")
    make_key(hsm, b"\x01")
    for outcome in (
        *kms.wrap_many([WrapRequest(KEY, "made")]),
        *kms.unwrap_many([UnwrapRequest(wrapped, "made")]),
    ):
        assert isinstance(outcome, KmsConfigurationError) and "same CKA_ID" in str(outcome)


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"EXTRACTABLE": True}, "CKA_EXTRACTABLE"),
        ({"SENSITIVE": False}, "CKA_SENSITIVE"),
        ({"KEY_TYPE": KeyType.GENERIC_SECRET}, "not an AES key"),
    ],
)
def test_keys_that_could_leave_the_token_are_refused(
    kms: Pkcs11Kms, hsm: SoftHsm, attributes: dict[str, Any], reason: str
) -> None:
    make_key(hsm, b"\x01", **attributes)
    with pytest.raises(KmsConfigurationError, match=reason) as caught:
        wrap_one(kms, KEY, "made")
    assert "create-key" in caught.value.hint
    with pytest.raises(KmsConfigurationError, match=reason):
        unwrap_one(kms, wrap_one(kms, KEY, "pii"), "made")
    assert kms.describe("made").enabled is False


def test_a_key_for_one_mechanism_is_not_used_for_another(kms: Pkcs11Kms, hsm: SoftHsm) -> None:
    with client(hsm, mechanism="AES_KEY_WRAP") as other:
        other.create_key("kw")
        wrapped = wrap_one(other, KEY, "kw")
        with pytest.raises(MasterKeyDisabledError, match="CKA_WRAP"):
            wrap_one(other, KEY, "pii")
    assert unwrap_one(kms, wrapped, "kw") == KEY  # a wrapped key names its mechanism
    with pytest.raises(MasterKeyDisabledError, match="CKA_ENCRYPT"):
        wrap_one(kms, KEY, "kw")
    with pytest.raises(WrappedKeyInvalidError):
        unwrap_one(kms, wrapped.replace("kw:", "gcm:"), "kw")


def test_a_deleted_key(kms: Pkcs11Kms, hsm: SoftHsm) -> None:
    wrapped = wrap_one(kms, KEY, "pii")
    kms.rotate_key("pii")
    hsm.destroy("pii", b"\x01")
    with pytest.raises(WrappedKeyInvalidError, match="no version 1"):
        unwrap_one(kms, wrapped, "pii")
    # In the middle of many calls.
    threading.Timer(0.2, lambda: hsm.destroy("pii")).start()
    end = time.monotonic() + 20
    while not isinstance(outcome := kms.wrap_many([WrapRequest(KEY, "pii")] * 50)[-1], KmsError):
        assert time.monotonic() < end
    assert isinstance(outcome, MasterKeyNotFoundError)


def test_the_raw_form_is_the_wrapped_key(kms: Pkcs11Kms) -> None:
    raw = kms.wrap_raw(KEY, "pii")
    assert raw.startswith(b"pkcs11:v1:gcm:")
    assert unwrap_one(kms, raw.decode("ascii"), "pii") == kms.unwrap_raw(raw, "pii") == KEY
    for damaged in (raw[:-4], b"pk\xffcs11" + raw[6:], b""):
        with pytest.raises(WrappedKeyInvalidError):
            kms.unwrap_raw(damaged, "pii")


# --- HSMs that choose the nonce: no such library is available, so SoftHSM's keys imitate one ---


def chosen_nonces(monkeypatch: pytest.MonkeyPatch, answer: Callable[[Any, bytes, Any], bytes]) -> None:
    """Make each key that is found encrypt in another way."""
    find = pkcs11.Session

    class Session:
        def __init__(self, session: Any) -> None:
            self._session = session

        def get_objects(self, attributes: Any) -> Iterator[Any]:
            for key in self._session.get_objects(attributes):
                encrypt = key.encrypt
                key.encrypt = lambda data, mechanism, mechanism_param, encrypt=encrypt: answer(
                    lambda given: encrypt(data, mechanism=mechanism, mechanism_param=given), data, mechanism_param
                )
                yield key

        def __getattr__(self, name: str) -> Any:
            return getattr(self._session, name)

    assert find is not None

    class Token:
        def __init__(self, token: Any) -> None:
            self._token = token

        def open(self, **options: Any) -> Any:
            return Session(self._token.open(**options))

        def __getattr__(self, name: str) -> Any:
            return getattr(self._token, name)

    fake_tokens(monkeypatch, Token)


def in_the_buffer(encrypt: Any, data: bytes, given: Any) -> bytes:
    """As in AWS CloudHSM: the nonce is written into the memory of the mechanism's parameter."""
    assert given.nonce == bytes(12)
    ctypes.memmove(given.nonce, SecretBytes.random(96).reveal(), 12)
    return encrypt(given)


def after_the_tag(length: int) -> Callable[[Any, bytes, Any], bytes]:
    """As in Thales' HSMs in FIPS mode: the nonce follows the tag."""

    def answer(encrypt: Any, data: bytes, given: Any) -> bytes:
        own = SecretBytes.random(96).reveal()
        return encrypt(pkcs11.GCMParams(own, aad=given.aad)) + (own + bytes(16))[:length]

    return answer


@pytest.mark.parametrize("answer", [in_the_buffer, after_the_tag(12)], ids=["in the buffer", "after the tag"])
def test_a_nonce_that_the_hsm_chooses(hsm: SoftHsm, monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    chosen_nonces(monkeypatch, answer)
    with client(hsm, hsm_chooses_nonce=True) as kms:
        kms.create_key("pii")
        wrapped = [wrap_one(kms, KEY, "pii") for _ in range(3)]
        assert len({each[14:30] for each in wrapped}) == 3
        assert kms.unwrap_many([UnwrapRequest(each, "pii") for each in wrapped]) == [KEY] * 3


def test_a_nonce_of_16_bytes_is_refused(hsm: SoftHsm, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen_nonces(monkeypatch, after_the_tag(16))
    with client(hsm) as kms:
        kms.create_key("pii")
        with pytest.raises(KmsConfigurationError, match="nonce of 16 bytes") as caught:
            wrap_one(kms, KEY, "pii")
        assert "AES_KEY_WRAP" in caught.value.hint


def test_a_nonce_of_zeros_is_refused(hsm: SoftHsm) -> None:
    """SoftHSM uses the given nonce: with this setting, all wraps would have the same one."""
    with client(hsm, hsm_chooses_nonce=True) as kms:
        kms.create_key("pii")
        with pytest.raises(KmsConfigurationError, match="chose no nonce"):
            wrap_one(kms, KEY, "pii")


def test_what_would_not_unwrap_is_refused(hsm: SoftHsm, monkeypatch: pytest.MonkeyPatch) -> None:
    def lies(encrypt: Any, data: bytes, given: Any) -> bytes:
        return encrypt(given) + SecretBytes.random(96).reveal()

    chosen_nonces(monkeypatch, lies)
    with client(hsm) as kms:
        kms.create_key("pii")
        with pytest.raises(KmsResponseInvalidError):
            wrap_one(kms, KEY, "pii")


# --- commands and files ---


CONFIGURATION = """
version: 1
kms: {{type: pkcs11, module: {module}, token_label: keys, pin: "${{HSM_PIN}}"}}
tables:
  people: {{footer_key: footer, column_keys: {{pii: [name]}}, unlisted_columns: footer_key}}
"""


@pytest.fixture
def config(hsm: SoftHsm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HSM_PIN", PIN)
    path = tmp_path / "people.yaml"
    path.write_text(CONFIGURATION.format(module=hsm.module))
    return path


def run(*arguments: object, status: int = 0) -> str:
    done = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert done.exit_code == status, done.output
    assert PIN not in done.output
    return done.stdout if not status else done.output


def test_the_life_of_a_master_key(config: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"name": ["Ada", "Grace"], "age": [36, 85]})
    pq.write_table(table, tmp_path / "plain.parquet")
    for name in ("footer", "pii"):
        assert name in run("pkcs11", "create-key", name, "--config", config)
    assert "already" in run("pkcs11", "create-key", "pii", "--config", config, status=2)
    run("check", config)
    file = tmp_path / "people.parquet"
    run("encrypt", tmp_path / "plain.parquet", file, "--config", config)
    assert "Version 2" in run("pkcs11", "rotate-key", "pii", "--config", config)
    run("rotate", file, "--config", config)
    run("pkcs11", "disable", "pii", "--key-version", 1, "--config", config)
    listed = json.loads(run("pkcs11", "list", "--json", "--config", config))
    assert [(row["name"], row["version"], row["current"], row["wraps"], row["unwraps"]) for row in listed] == [
        ("footer", 1, True, True, True),
        ("pii", 1, False, False, False),
        ("pii", 2, True, True, True),
    ]
    assert {row["origin"] for row in listed} == {"generated in the token"}
    run("verify", file, "--config", config)
    run("decrypt", file, tmp_path / "again.parquet", "--config", config)
    assert pq.read_table(tmp_path / "again.parquet").equals(table)
    run("pkcs11", "disable", "pii", "--config", config)
    assert re.search(r"pii *│? *2.*disabled|disabled", run("pkcs11", "list", "--config", config))
    run("decrypt", file, tmp_path / "third.parquet", "--config", config, status=3)
    assert "no version 7" in run("pkcs11", "enable", "pii", "--key-version", 7, "--config", config, status=3)
    run("pkcs11", "enable", "pii", "--key-version", 2, "--config", config)
    run("decrypt", file, tmp_path / "third.parquet", "--config", config)
    assert "no such master key" in run("pkcs11", "rotate-key", "none", "--config", config, status=3)


def test_commands_need_a_token(tmp_path: Path) -> None:
    path = tmp_path / "other.yaml"
    path.write_text("version: 1\nkms: {type: in_memory, keys: [k]}\n")
    assert "no KMS of the type pkcs11" in run("pkcs11", "list", "--config", path, status=2)
