"""The KMS client of Google Cloud KMS, over a gRPC server that imitates it."""

import base64
import datetime
import ipaddress
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google.auth
import grpc
import pyarrow.parquet as pq
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from gcp_fake import KEY_RING, CuttingProxy, FakeGcpKms, State, fake_gcp_kms, retry_info
from google.auth.credentials import Credentials
from google.auth.exceptions import DefaultCredentialsError, RefreshError, TransportError
from google.auth.transport.requests import Request
from google.cloud.kms_v1 import KeyManagementServiceClient
from google.cloud.kms_v1.services.key_management_service.transports import KeyManagementServiceGrpcTransport
from google.cloud.kms_v1.types import CryptoKey, ProtectionLevel
from pydantic import ValidationError
from soak import SOAK
from virtual_time import VirtualTime

from parquet_keytools import Keytools
from parquet_keytools.demo import read_flights
from parquet_keytools.errors import (
    KmsAccessDeniedError,
    KmsConfigurationError,
    KmsError,
    KmsResponseInvalidError,
    KmsThrottledError,
    KmsUnavailableError,
    MasterKeyDisabledError,
    MasterKeyNotFoundError,
    MasterKeyNotTrustedError,
    WrappedKeyInvalidError,
)
from parquet_keytools.kms import gcp
from parquet_keytools.kms.client import KmsClient, UnwrapRequest, WrapRequest
from parquet_keytools.kms.contract_tests import CANARY, KmsClientContract, unwrap_one, wrap_one
from parquet_keytools.kms.gcp import GcpKms, GcpSettings, TokenSource, crc32c, load_credentials, open_client
from parquet_keytools.secret_bytes import SecretBytes

CANARY_TEXT = "a key to be looked for"
QUICK = {"max_tries": 3, "call_timeout_seconds": 2, "timeout_seconds": 6}


def settings(endpoint: str, **more: Any) -> GcpSettings:
    place = {"project": "test-project", "location": "europe-west1", "key_ring": "test-ring"}
    return GcpSettings.model_validate({"endpoint": endpoint, "insecure": True} | place | QUICK | more)


@pytest.fixture
def server() -> Iterator[FakeGcpKms]:
    with fake_gcp_kms("one", "two") as server:
        yield server


@pytest.fixture
def kms(server: FakeGcpKms) -> Iterator[GcpKms]:
    with GcpKms(settings(server.endpoint, additional_authenticated_data={"b": "1", "a": "é"})) as kms:
        yield kms


@pytest.fixture(autouse=True)
def records() -> Iterator[list[logging.LogRecord]]:
    """The full log, at DEBUG, with Google's libraries; no test may leave a key in it."""
    found: list[logging.LogRecord] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = found.append  # type: ignore[assignment, method-assign]
    loggers = [logging.getLogger(name) for name in ("", "google")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.DEBUG)
    loggers[1].addHandler(handler)
    loggers[0].addHandler(handler)
    yield found
    for logger, (level, propagate) in zip(loggers, before, strict=True):
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
    assert not shows_canary(*(str(vars(record)) for record in found))


def shows_canary(*texts: str) -> bool:
    key = CANARY.reveal()
    spellings = (CANARY_TEXT, key.hex(), base64.b64encode(key).decode()[:20])
    return any(spelling in text for spelling in spellings for text in texts)


def failure(call: Callable[[], object]) -> KmsError:
    """Return the error of a call, after a search for the canary in all that it shows."""
    with pytest.raises(KmsError) as caught:
        call()
    error = caught.value
    printed = "".join(traceback.TracebackException.from_exception(error, capture_locals=False).format())
    assert not shows_canary(str(error), repr(error), repr(vars(error)), printed, str(pickle.dumps(error)))
    assert error.__cause__ is None and error.__context__ is None
    assert "projects/" not in str(error).replace(repr(error.master_key_id), "").replace("projects/PROJECT/", "")
    return error


# --- contract ---


class TestGcpKmsContract(KmsClientContract):
    @pytest.fixture
    def kms(self, server: FakeGcpKms) -> Iterator[KmsClient]:
        with GcpKms(settings(server.endpoint)) as kms:
            yield kms

    @pytest.fixture
    def master_key_id(self) -> str:
        return "one"

    @pytest.fixture
    def other_master_key_id(self) -> str:
        return f"{KEY_RING}/cryptoKeys/two"

    @pytest.fixture(autouse=True)
    def _remember(self, server: FakeGcpKms) -> None:
        self.server_of_this_test = server

    def disable_key(self, kms: KmsClient, master_key_id: str) -> None:
        self.server_of_this_test.key(master_key_id).set_state(State.DISABLED)

    def deny_key(self, kms: KmsClient, master_key_id: str) -> None:
        self.server_of_this_test.deny(master_key_id)

    def add_version(self, kms: KmsClient, master_key_id: str) -> None:
        self.server_of_this_test.key(master_key_id).add_version()


# --- names and settings ---


def test_a_wrapped_key_is_the_ciphertext_and_nothing_else(server: FakeGcpKms, kms: GcpKms) -> None:
    wrapped_key = wrap_one(kms, CANARY, "one")
    # The SDK logs this call, which is not ours, with the key.
    logging.getLogger("google").setLevel(logging.INFO)
    client = open_client(server.endpoint, insecure=True)
    answer = client.decrypt(
        request={
            "name": f"{KEY_RING}/cryptoKeys/one",
            "ciphertext": base64.b64decode(wrapped_key, validate=True),
            "additional_authenticated_data": '{"a":"é","b":"1"}'.encode(),
        }
    )
    client.transport.close()
    assert answer.plaintext == CANARY.reveal()
    assert kms.wrapped_key_version(wrapped_key, "one") is None


def test_the_raw_form_is_the_ciphertext_without_aad(server: FakeGcpKms, kms: GcpKms) -> None:
    """So that Iceberg's `GcpKeyManagementClient`, which sends no AAD, can read it."""
    with GcpKms(settings(server.endpoint, additional_authenticated_data=None)) as plain:
        ciphertext = plain.wrap_raw(CANARY, "one")
        assert unwrap_one(plain, base64.b64encode(ciphertext).decode(), "one") == CANARY
        assert plain.unwrap_raw(ciphertext, "one") == CANARY
        with pytest.raises(WrappedKeyInvalidError):
            plain.unwrap_raw(ciphertext[:-1], "one")
    for call in (lambda: kms.wrap_raw(CANARY, "one"), lambda: kms.unwrap_raw(ciphertext, "one")):
        with pytest.raises(KmsConfigurationError, match="additional authenticated data"):
            call()


def test_a_full_name_needs_no_key_ring(server: FakeGcpKms) -> None:
    name = f"{KEY_RING}/cryptoKeys/one"
    with GcpKms(GcpSettings(endpoint=server.endpoint, insecure=True)) as kms:
        assert unwrap_one(kms, wrap_one(kms, CANARY, name), name) == CANARY
        error = failure(lambda: wrap_one(kms, CANARY, "one"))
    assert isinstance(error, KmsConfigurationError) and "project, location and key_ring" in error.hint


def test_a_master_key_has_one_name(server: FakeGcpKms, kms: GcpKms) -> None:
    """Any name of a key identifies it; an invalid name identifies nothing."""
    name = f"{KEY_RING}/cryptoKeys/one"
    other = name.replace("test-ring", "other-ring")
    assert kms.identity("one") == kms.identity(name) == name
    assert kms.identity(other) == other
    assert kms.identity(f"{name}/cryptoKeyVersions/1") is None
    assert kms.identity("") is None
    assert not server.calls
    with GcpKms(GcpSettings(endpoint=server.endpoint, insecure=True)) as without_key_ring:
        assert without_key_ring.identity("one") is None
        assert without_key_ring.identity(name) == name


@pytest.mark.parametrize(
    ("master_key_id", "hint"),
    [
        (f"{KEY_RING}/cryptoKeys/one/cryptoKeyVersions/1", f"Name the key: {KEY_RING}/cryptoKeys/one."),
        (KEY_RING, "projects/PROJECT/"),
        (f"/{KEY_RING}/cryptoKeys/one", "projects/PROJECT/"),
        (f"{KEY_RING}/cryptoKeys/one/../two", "projects/PROJECT/"),
        (f"{KEY_RING}/cryptoKeys/one\n", "projects/PROJECT/"),
        ("arn:aws:kms:eu-west-1:111122223333:key/1234", "projects/PROJECT/"),
        ("", "projects/PROJECT/"),
    ],
)
def test_what_is_no_name_of_a_key_is_refused(
    server: FakeGcpKms, kms: GcpKms, master_key_id: str, hint: str
) -> None:
    for call in (lambda: wrap_one(kms, CANARY, master_key_id), lambda: kms.describe(master_key_id)):
        with pytest.raises(KmsConfigurationError) as caught:
            call()
        assert hint in caught.value.hint
    assert not server.calls


@pytest.mark.parametrize(
    "wrong",
    [
        {"insecure": True},
        {"insecure": True, "endpoint": "kms.example"},
        {"insecure": True, "endpoint": "10.0.0.1:80"},
        {"insecure": True, "endpoint": "127.0.0.1.example.com:80"},
        {"insecure": True, "endpoint": "127.0.0.1:80", "credentials_file": "key.json"},
        {"insecure": True, "endpoint": "127.0.0.1:80", "impersonate_service_account": "a@b.example"},
        {"endpoint": "https://cloudkms.googleapis.com"},
        {"endpoint": "unix:/tmp/socket"},
        {"endpoint": "dns:///cloudkms.googleapis.com"},
        {"endpoint": ""},
        {"impersonate_service_account": "somebody"},
        {"impersonation_delegates": ["a@b.example"]},
        {"project": "p/x", "location": "global", "key_ring": "r"},
        {"additional_authenticated_data": "x" * 65_537},
        {"additional_authenticated_data": {"a": {"b": "c"}}},
        {"timeout": 3},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GcpSettings.model_validate({"type": "gcp", **wrong})


@pytest.mark.parametrize("endpoint", ["localhost:1", "127.0.0.1:1", "127.1.2.3", "[::1]:1"])
def test_insecure_is_for_this_machine(endpoint: str) -> None:
    assert GcpSettings(endpoint=endpoint, insecure=True).insecure


def test_additional_authenticated_data_binds(server: FakeGcpKms, kms: GcpKms) -> None:
    wrapped_key = wrap_one(kms, CANARY, "one")
    for other in ["", "x", {"a": "é"}, {"a": "é", "b": "2"}]:
        with GcpKms(settings(server.endpoint, additional_authenticated_data=other)) as other_kms:
            error = failure(lambda kms=other_kms: unwrap_one(kms, wrapped_key, "one"))
            assert isinstance(error, WrappedKeyInvalidError) and "additional_authenticated_data" in error.hint
    same = {"a": "é", "b": "1"}
    with GcpKms(settings(server.endpoint, additional_authenticated_data=same)) as same_kms:
        assert unwrap_one(same_kms, wrapped_key, "one") == CANARY
    with GcpKms(settings(server.endpoint, additional_authenticated_data='{"a":"é","b":"1"}')) as same_kms:
        assert unwrap_one(same_kms, wrapped_key, "one") == CANARY


@pytest.mark.parametrize(
    ("data", "checksum"),
    [(b"", 0), (b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43)],
)
def test_crc32c_is_that_of_rfc_3720(data: bytes, checksum: int) -> None:
    assert crc32c(data) == checksum


# --- states ---


@pytest.mark.parametrize("state", [State.DISABLED, State.DESTROY_SCHEDULED, State.DESTROYED])
def test_a_version_that_is_not_enabled(server: FakeGcpKms, kms: GcpKms, state: Any) -> None:
    old = wrap_one(kms, CANARY, "one")
    server.key("one").add_version()
    new = wrap_one(kms, CANARY, "one")
    server.key("one").versions[0].state = state
    server.calls.clear()
    error = failure(lambda: unwrap_one(kms, old, "one"))
    assert isinstance(error, MasterKeyDisabledError)
    assert (error.tries, server.calls["Decrypt"]) == (1, 1)
    assert error.detail == "FAILED_PRECONDITION, KEY_NOT_ENABLED"
    assert unwrap_one(kms, new, "one") == CANARY
    server.key("one").versions[1].state = state
    assert isinstance(failure(lambda: wrap_one(kms, CANARY, "one")), MasterKeyDisabledError)
    description = kms.describe("one")
    assert (description.enabled, description.current_version) == (False, "2")


def test_a_key_without_a_primary_version(server: FakeGcpKms, kms: GcpKms) -> None:
    wrapped_key = wrap_one(kms, CANARY, "one")
    server.key("one").primary = None
    assert isinstance(failure(lambda: wrap_one(kms, CANARY, "one")), MasterKeyDisabledError)
    assert unwrap_one(kms, wrapped_key, "one") == CANARY
    description = kms.describe("one")
    assert (description.enabled, description.current_version) == (False, None)


def test_describe_tells_versions_and_origin(server: FakeGcpKms, kms: GcpKms) -> None:
    key = server.key("one")
    for _ in range(11):
        key.add_version()
    key.protection_level = ProtectionLevel.HSM
    key.versions[-1].import_job = f"{KEY_RING}/importJobs/job"
    description = kms.describe("one")
    assert description.enabled and description.current_version == "12"
    assert description.origin == "HSM, imported"
    assert description.rotates is False
    key.rotation_period = datetime.timedelta(days=90)
    assert kms.describe("one").rotates is True
    assert server.calls["ListCryptoKeyVersions"] == 0


def test_describe_refuses_a_key_for_signing(server: FakeGcpKms, kms: GcpKms) -> None:
    server.key("one").purpose = CryptoKey.CryptoKeyPurpose.ASYMMETRIC_SIGN
    assert isinstance(failure(lambda: kms.describe("one")), KmsConfigurationError)


def test_describe_refuses_another_key(server: FakeGcpKms, kms: GcpKms) -> None:
    server.corrupt(lambda answer: setattr(answer, "name", f"{KEY_RING}/cryptoKeys/two"))
    assert isinstance(failure(lambda: kms.describe("one")), KmsResponseInvalidError)


def test_a_denial_says_why(server: FakeGcpKms, kms: GcpKms) -> None:
    server.deny("one", "Encrypt")
    error = failure(lambda: wrap_one(kms, CANARY, "one"))
    assert isinstance(error, KmsAccessDeniedError)
    assert (error.detail, error.tries) == ("PERMISSION_DENIED, IAM_PERMISSION_DENIED", 1)


# --- faults ---

FINAL = {
    "ALREADY_EXISTS": (KmsResponseInvalidError, 3),
    "DATA_LOSS": (KmsResponseInvalidError, 3),
    "FAILED_PRECONDITION": (MasterKeyDisabledError, 1),
    "INVALID_ARGUMENT": (KmsConfigurationError, 1),
    "NOT_FOUND": (MasterKeyNotFoundError, 1),
    "PERMISSION_DENIED": (KmsAccessDeniedError, 1),
    "UNAUTHENTICATED": (KmsConfigurationError, 1),
    "UNIMPLEMENTED": (KmsConfigurationError, 1),
}
PASSING = {
    "ABORTED": KmsUnavailableError,
    "CANCELLED": KmsUnavailableError,
    "DEADLINE_EXCEEDED": KmsUnavailableError,
    "INTERNAL": KmsUnavailableError,
    "RESOURCE_EXHAUSTED": KmsThrottledError,
    "UNAVAILABLE": KmsUnavailableError,
    "UNKNOWN": KmsUnavailableError,
}


@pytest.mark.parametrize("status", FINAL)
def test_a_final_error_ends_in_its_class(server: FakeGcpKms, kms: GcpKms, status: str) -> None:
    kind, tries = FINAL[status]
    wrapped_key = wrap_one(kms, CANARY, "one")
    server.fail(status)
    server.calls.clear()
    error = failure(lambda: wrap_one(kms, CANARY, "one"))
    assert (type(error), error.tries, server.calls["Encrypt"]) == (kind, tries, tries)
    assert error.detail.startswith(status)
    error = failure(lambda: unwrap_one(kms, wrapped_key, "one"))
    expected = WrappedKeyInvalidError if status == "INVALID_ARGUMENT" else kind
    assert (type(error), error.tries, server.calls["Decrypt"]) == (expected, tries, tries)


@pytest.mark.parametrize("status", PASSING)
def test_a_passing_error_is_tried_again(server: FakeGcpKms, kms: GcpKms, status: str) -> None:
    server.fail(status, times=2)
    wrapped_key = wrap_one(kms, CANARY, "one")
    assert server.calls["Encrypt"] == 3
    server.fail(status, times=1)
    assert unwrap_one(kms, wrapped_key, "one") == CANARY
    server.fail(status)
    server.calls.clear()
    error = failure(lambda: wrap_one(kms, CANARY, "one"))
    assert (type(error), error.tries, server.calls["Encrypt"]) == (PASSING[status], 3, 3)
    where = f"{kms.settings.endpoint}: " if isinstance(error, KmsUnavailableError) else ""
    assert error.detail.startswith(f"{where}{status}")


def test_a_request_damaged_on_its_way_is_sent_again(server: FakeGcpKms, kms: GcpKms) -> None:
    wrapped_key = wrap_one(kms, CANARY, "one")
    text = "The checksum in field ciphertext_crc32c did not match the data in field ciphertext."
    server.fail("INVALID_ARGUMENT", message=text, times=2)
    assert unwrap_one(kms, wrapped_key, "one") == CANARY
    server.fail("INVALID_ARGUMENT", message=text)
    error = failure(lambda: unwrap_one(kms, wrapped_key, "one"))
    assert (type(error), error.tries) == (KmsResponseInvalidError, 3)


def test_checksums_are_sent_of_all_that_is_sent(server: FakeGcpKms, kms: GcpKms) -> None:
    seen: list[Any] = []
    server.add_fault(lambda method, request, context: seen.append(request))
    unwrap_one(kms, wrap_one(kms, CANARY, "one"), "one")
    encrypt, decrypt = seen
    assert encrypt.plaintext_crc32c == crc32c(encrypt.plaintext)
    assert decrypt.ciphertext_crc32c == crc32c(decrypt.ciphertext)
    for request in seen:
        assert request.additional_authenticated_data == '{"a":"é","b":"1"}'.encode()
        assert request.additional_authenticated_data_crc32c == crc32c(request.additional_authenticated_data)


def test_throttled_for_a_while(server: FakeGcpKms) -> None:
    server.fail("RESOURCE_EXHAUSTED", seconds=0.4)
    with GcpKms(settings(server.endpoint, max_tries=10, timeout_seconds=20)) as kms:
        outcomes = kms.wrap_many([WrapRequest(CANARY, "one") for _ in range(8)])
    assert all(isinstance(outcome, str) for outcome in outcomes), outcomes


def test_it_waits_as_long_as_cloud_kms_asks(server: FakeGcpKms) -> None:
    clock = VirtualTime()
    with GcpKms(settings(server.endpoint), time_source=clock.source()) as kms:
        server.fail("RESOURCE_EXHAUSTED", retry_info(1.25), times=1)
        wrap_one(kms, CANARY, "one")
        assert sum(clock.slept) == 1.25
        server.fail("RESOURCE_EXHAUSTED", retry_info(3600))
        error = failure(lambda: wrap_one(kms, CANARY, "one"))
    assert sum(clock.slept) == 1.25
    assert isinstance(error, KmsThrottledError) and error.retry_after_seconds == 3600


def test_a_slow_answer_ends_within_the_deadline(server: FakeGcpKms) -> None:
    server.latency_seconds = 1.5
    with GcpKms(settings(server.endpoint, call_timeout_seconds=0.4, timeout_seconds=4, max_tries=100)) as kms:
        error = failure(lambda: wrap_one(kms, CANARY, "one"))
    assert isinstance(error, KmsUnavailableError) and ": DEADLINE_EXCEEDED" in error.detail
    # Counted where they arrive: the library makes no calls of its own, and a call that waited
    # for this machine may not have arrived. More calls would take longer than the deadline.
    assert 2 <= server.calls["Encrypt"] <= error.tries <= 10


def test_a_connection_cut_in_the_middle(server: FakeGcpKms) -> None:
    proxy = CuttingProxy(server.endpoint)
    server.latency_seconds = 0.3
    with GcpKms(settings(proxy.endpoint, max_tries=10)) as kms:
        wrap_one(kms, CANARY, "one")
        for _ in range(3):
            cut = threading.Timer(0.15, proxy.cut)
            cut.start()
            assert unwrap_one(kms, wrap_one(kms, CANARY, "one"), "one") == CANARY
            cut.join()
        wrap_one(kms, CANARY, "one")
        assert proxy.connections >= 4
        proxy.close()
        server.stop()
    clock = VirtualTime()
    with GcpKms(settings(proxy.endpoint, max_tries=10), time_source=clock.source()) as kms:
        error = failure(lambda: wrap_one(kms, CANARY, "one"))
        assert isinstance(error, KmsUnavailableError)
        assert sum(clock.slept) < QUICK["timeout_seconds"]


def empty_ciphertext(answer: Any) -> None:
    answer.ciphertext = b""
    answer.ciphertext_crc32c = 0


ENCRYPT_CORRUPTIONS: dict[str, Callable[[Any], None]] = {
    "wrong checksum": lambda a: setattr(a, "ciphertext_crc32c", a.ciphertext_crc32c ^ 1),
    "no checksum": lambda a: setattr(a, "ciphertext_crc32c", None),
    "damaged ciphertext": lambda a: setattr(a, "ciphertext", a.ciphertext[:-1] + bytes([a.ciphertext[-1] ^ 1])),
    "no ciphertext": empty_ciphertext,
    "plaintext not verified": lambda a: setattr(a, "verified_plaintext_crc32c", False),
    "AAD not verified": lambda a: setattr(a, "verified_additional_authenticated_data_crc32c", False),
    "another key": lambda a: setattr(a, "name", a.name.replace("/one/", "/two/")),
    "no version": lambda a: setattr(a, "name", f"{KEY_RING}/cryptoKeys/one"),
    "no name": lambda a: setattr(a, "name", ""),
}
DECRYPT_CORRUPTIONS: dict[str, Callable[[Any], None]] = {
    "wrong checksum": lambda a: setattr(a, "plaintext_crc32c", a.plaintext_crc32c ^ 1),
    "no checksum": lambda a: setattr(a, "plaintext_crc32c", None),
    "damaged plaintext": lambda a: setattr(a, "plaintext", a.plaintext[:-1] + b"?"),
}


@pytest.mark.parametrize("corruption", ENCRYPT_CORRUPTIONS)
def test_a_corrupted_answer_to_encrypt(server: FakeGcpKms, kms: GcpKms, corruption: str) -> None:
    server.corrupt(ENCRYPT_CORRUPTIONS[corruption], times=2)
    wrapped_key = wrap_one(kms, CANARY, "one")
    assert server.calls["Encrypt"] == 3
    assert unwrap_one(kms, wrapped_key, "one") == CANARY
    server.corrupt(ENCRYPT_CORRUPTIONS[corruption])
    error = failure(lambda: wrap_one(kms, CANARY, "one"))
    assert (type(error), error.tries, server.calls["Encrypt"]) == (KmsResponseInvalidError, 3, 6)


@pytest.mark.parametrize("corruption", DECRYPT_CORRUPTIONS)
def test_a_corrupted_answer_to_decrypt(server: FakeGcpKms, kms: GcpKms, corruption: str) -> None:
    wrapped_key = wrap_one(kms, CANARY, "one")
    server.corrupt(DECRYPT_CORRUPTIONS[corruption], times=2)
    assert unwrap_one(kms, wrapped_key, "one") == CANARY
    assert server.calls["Decrypt"] == 3
    server.corrupt(DECRYPT_CORRUPTIONS[corruption])
    error = failure(lambda: unwrap_one(kms, wrapped_key, "one"))
    assert (type(error), error.tries, server.calls["Decrypt"]) == (KmsResponseInvalidError, 3, 6)


def test_a_key_of_another_length(server: FakeGcpKms, kms: GcpKms) -> None:
    def lengthen(answer: Any) -> None:
        answer.plaintext += b"!"
        answer.plaintext_crc32c = crc32c(answer.plaintext)

    wrapped_key = wrap_one(kms, CANARY, "one")
    server.corrupt(lengthen)
    assert isinstance(failure(lambda: unwrap_one(kms, wrapped_key, "one")), KmsResponseInvalidError)


def test_calls_under_way_are_bounded(server: FakeGcpKms) -> None:
    server.latency_seconds = 0.02
    with GcpKms(settings(server.endpoint, max_concurrent_calls=8)) as kms:
        wrapped = kms.wrap_many([WrapRequest(CANARY, "one") for _ in range(100)])
        keys = kms.unwrap_many([UnwrapRequest(str(text), "one") for text in wrapped])
    assert keys == [CANARY] * 100
    assert 4 < server.most_under_way <= 8


# --- logs ---

LOGGING_PROGRAM = """
import base64, sys
sys.path.insert(0, sys.argv[1])
from gcp_fake import KEY_RING, fake_gcp_kms
from parquet_keytools.kms.contract_tests import CANARY
from parquet_keytools.kms.contract_tests import unwrap_one, wrap_one
from parquet_keytools.kms.gcp import GcpKms, GcpSettings
from parquet_keytools.kms.gcp import open_client
from parquet_keytools.kms.gcp import TokenSource, load_credentials

name = f"{KEY_RING}/cryptoKeys/one"
with fake_gcp_kms("one") as server:
    with GcpKms(GcpSettings(endpoint=server.endpoint, insecure=True)) as kms:
        assert unwrap_one(kms, wrap_one(kms, CANARY, name), name) == CANARY
        server.fail("INTERNAL", times=1)
        kms.describe(name)
    for stream in (sys.stdout, sys.stderr):
        print("now the calls of others", file=stream, flush=True)
    open_client(server.endpoint, insecure=True).encrypt(name=name, plaintext=CANARY.reveal())
"""


def test_the_sdk_logs_no_key_of_ours() -> None:
    """It still logs everything in calls of others: that is their choice, and proves that it would."""
    environment = os.environ | {"GOOGLE_SDK_PYTHON_LOGGING_SCOPE": "google"}
    command = [sys.executable, "-c", LOGGING_PROGRAM, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    parts = [text.partition("now the calls of others") for text in (done.stdout, done.stderr)]
    ours, _, others = zip(*parts, strict=True)
    assert not shows_canary(*ours) and shows_canary(*others)


@pytest.mark.parametrize("in_a_thread", [False, True])
def test_the_sdk_logs_no_token_of_ours(in_a_thread: bool, caplog: pytest.LogCaptureFixture) -> None:
    """It hides tokens in bodies, and logs the headers as they are; it makes some requests in its own threads."""

    class Asking(StaticCredentials):
        def refresh(self, request: Any) -> None:
            def ask() -> None:
                with pytest.raises(TransportError):
                    request(
                        url="http://127.0.0.1:1", method="POST", headers={"authorization": "Bearer secret-token"}
                    )

            if in_a_thread:
                thread = threading.Thread(target=ask)
                thread.start()
                thread.join()
            else:
                ask()
            super().refresh(request)

    logger = logging.getLogger("google.auth.transport.requests")
    with caplog.at_level(logging.DEBUG, logger.name):
        logger.addHandler(caplog.handler)
        try:
            TokenSource(Asking()).headers("https://kms.example", 5)
            assert "secret-token" not in str([vars(record) for record in caplog.records])
            Asking().refresh(Request())
            assert "secret-token" in str([vars(record) for record in caplog.records])
        finally:
            logger.removeHandler(caplog.handler)


def test_repr_shows_nothing(kms: GcpKms) -> None:
    wrap_one(kms, CANARY, "one")
    assert repr(kms) == f"<GcpKms at {kms.settings.endpoint}>"
    assert not shows_canary(repr(vars(kms)))


# --- a client that is passed in ---


def test_a_ready_client(server: FakeGcpKms) -> None:
    channel = grpc.insecure_channel(server.endpoint)
    client = KeyManagementServiceClient(
        transport=KeyManagementServiceGrpcTransport(host=server.endpoint, channel=channel)
    )
    name = f"{KEY_RING}/cryptoKeys/one"
    with GcpKms(client=client) as kms:
        assert unwrap_one(kms, wrap_one(kms, CANARY, name), name) == CANARY
        server.fail("ABORTED", times=2)
        wrap_one(kms, CANARY, name)
        assert kms._principal() == "a client of the caller"
        assert repr(kms) == f"<GcpKms at {server.endpoint}>"
    # It is still open.
    assert client.get_crypto_key(name=name).name == name
    child = os.fork()
    if child == 0:
        status = 1
        try:
            wrap_one(kms, CANARY, name)
        except KmsConfigurationError:
            status = 0
        finally:
            # No output of pytest in the child.
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    channel.close()


def test_a_ready_client_must_use_grpc() -> None:
    from google.auth.credentials import AnonymousCredentials

    client = KeyManagementServiceClient(transport="rest", credentials=AnonymousCredentials())
    with pytest.raises(KmsConfigurationError, match="gRPC"):
        GcpKms(client=client)


# --- forks ---

FORK_PROGRAM = """
import os, sys, threading, time
sys.path.insert(0, sys.argv[1])
from gcp_fake import KEY_RING
from parquet_keytools.kms.contract_tests import CANARY
from parquet_keytools.kms.contract_tests import unwrap_one, wrap_one
from parquet_keytools.kms.gcp import GcpKms, GcpSettings

name = f"{KEY_RING}/cryptoKeys/one"
kms = GcpKms(GcpSettings(endpoint=sys.argv[2], insecure=True))
wrapped_key = wrap_one(kms, CANARY, name)
done, failures = threading.Event(), []

def work():
    while not done.is_set():
        if unwrap_one(kms, wrapped_key, name) != CANARY:
            failures.append(1)

threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
statuses = []
for _ in range(int(sys.argv[3])):
    child = os.fork()
    if child == 0:
        good = unwrap_one(kms, wrap_one(kms, CANARY, name), name) == CANARY
        kms.close()
        os._exit(0 if good else 3)
    end = time.monotonic() + 20
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended or time.monotonic() > end:
            break
        time.sleep(0.01)
    if not ended:
        os.kill(child, 9)
        os.waitpid(child, 0)
    statuses.append(status if ended else "hangs")
done.set()
for thread in threads:
    thread.join()
assert not any(statuses), statuses
assert not failures
kms.close()
"""


def test_children_forked_during_calls(server: FakeGcpKms) -> None:
    command = [sys.executable, "-c", FORK_PROGRAM, str(Path(__file__).parent), server.endpoint]
    command.append("25" if SOAK else "8")
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_fork_waits_for_calls_under_way(server: FakeGcpKms, kms: GcpKms) -> None:
    wrap_one(kms, CANARY, "one")
    server.latency_seconds = 0.6
    call = threading.Thread(target=wrap_one, args=(kms, CANARY, "one"))
    call.start()
    while server.calls["Encrypt"] < 2:
        time.sleep(0.01)
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert server.under_way == 0
    assert os.waitpid(child, 0)[1] == 0
    call.join()
    server.latency_seconds = 0
    assert unwrap_one(kms, wrap_one(kms, CANARY, "one"), "one") == CANARY


# --- credentials ---


class StaticCredentials(Credentials):  # type: ignore[misc]
    """Credentials whose refresh ends as a test chooses."""

    def __init__(self, error: Exception | None = None, valid_seconds: float = 3600) -> None:
        super().__init__()
        self.error = error
        self.valid_seconds = valid_seconds
        self.refreshed = 0

    def refresh(self, request: Any) -> None:
        self.refreshed += 1
        if self.error is not None:
            raise self.error
        self.token = f"secret-token-{self.refreshed}"
        now = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
        self.expiry = now + datetime.timedelta(seconds=self.valid_seconds)


@pytest.fixture
def authenticated(server: FakeGcpKms, monkeypatch: pytest.MonkeyPatch) -> Callable[..., GcpKms]:
    """Make a client with credentials whose channel has no TLS."""

    def make(credentials: Any) -> GcpKms:
        monkeypatch.setattr(google.auth, "default", lambda **_: (credentials, None))
        monkeypatch.setattr(gcp, "open_client", lambda endpoint, *, insecure: open_client(endpoint, insecure=True))
        return GcpKms(settings(server.endpoint, insecure=False))

    return make


def test_a_token_is_renewed_in_time(server: FakeGcpKms, authenticated: Callable[..., GcpKms]) -> None:
    credentials = StaticCredentials()
    with authenticated(credentials) as kms:
        kms.wrap_many([WrapRequest(CANARY, "one") for _ in range(50)])
        assert credentials.refreshed == 1
        assert {call["authorization"] for call in server.metadata} == {"Bearer secret-token-1"}
        credentials.expiry = datetime.datetime(2020, 1, 1)
        wrap_one(kms, CANARY, "one")
        assert server.metadata[-1]["authorization"] == "Bearer secret-token-2"


def test_a_token_that_is_refused_is_replaced_once(
    server: FakeGcpKms, authenticated: Callable[..., GcpKms]
) -> None:
    """It was revoked, or a clock is wrong: its known expiry says that it is valid."""
    credentials = StaticCredentials()
    with authenticated(credentials) as kms:
        wrap_one(kms, CANARY, "one")
        server.fail("UNAUTHENTICATED", times=1)
        wrap_one(kms, CANARY, "one")
        assert server.metadata[-1]["authorization"] == "Bearer secret-token-2"
        # If each token is refused, a call does not request another one each time.
        server.fail("UNAUTHENTICATED", times=20)
        outcomes = kms.wrap_many([WrapRequest(CANARY, "one") for _ in range(20)])
    assert {type(outcome) for outcome in outcomes} == {KmsConfigurationError}
    assert credentials.refreshed == 2


@pytest.mark.parametrize(
    ("error", "kind", "tries"),
    [
        (RefreshError("invalid_grant secret-text"), KmsConfigurationError, 1),
        (RefreshError("busy secret-text", retryable=True), KmsUnavailableError, 3),
        (TransportError("no route secret-text"), KmsUnavailableError, 3),
        (DefaultCredentialsError("secret-text"), KmsConfigurationError, 1),
    ],
)
def test_a_token_that_cannot_be_had(
    server: FakeGcpKms,
    authenticated: Callable[..., GcpKms],
    error: Exception,
    kind: type[KmsError],
    tries: int,
) -> None:
    credentials = StaticCredentials(error)
    with authenticated(credentials) as kms:
        outcomes = kms.wrap_many([WrapRequest(CANARY, "one") for _ in range(50)])
        assert {type(outcome) for outcome in outcomes} == {kind}
        found = failure(lambda: wrap_one(kms, CANARY, "one"))
    assert found.tries == tries
    assert credentials.refreshed == 2 * tries
    assert "secret-text" not in str(found) and "GOOGLE_APPLICATION_CREDENTIALS" in found.hint
    assert not server.calls


def test_a_token_is_waited_for_no_longer_than_a_call_lasts() -> None:
    """Otherwise each thread would wait for all before it, one after the other, for a silent token service."""
    released = threading.Event()
    timeouts: list[float] = []

    def request(*_: Any, timeout: float, **__: Any) -> None:
        timeouts.append(timeout)
        released.wait(timeout)
        raise TransportError("no answer")

    class Asking(StaticCredentials):
        def refresh(self, request: Any) -> None:
            request(url="https://token.example", method="POST", timeout=60)

    tokens = TokenSource(Asking(), request)
    times: list[float] = []

    def ask() -> None:
        start = time.monotonic()
        with pytest.raises(TransportError):
            tokens.headers("https://kms.example", 0.5)
        times.append(time.monotonic() - start)

    threads = [threading.Thread(target=ask) for _ in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    released.set()
    # One after the other, the last one would wait for half a minute.
    assert len(times) == 60 and max(times) < 15
    assert max(timeouts) <= 0.5


def test_no_default_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(**_: object) -> None:
        raise DefaultCredentialsError("secret-text")

    monkeypatch.setattr(google.auth, "default", none)
    with GcpKms(settings("127.0.0.1:1", insecure=False)) as kms:
        error = failure(lambda: wrap_one(kms, CANARY, "one"))
    assert isinstance(error, KmsConfigurationError) and "gcloud auth" in error.hint


def service_account_file(folder: Path) -> Path:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    info = {
        "type": "service_account",
        "client_email": "writer@test-project.iam.gserviceaccount.com",
        "private_key_id": "1",
        "private_key": pem.decode(),
        "token_uri": "https://127.0.0.1:1/token",
    }
    path = folder / "account.json"
    path.write_text(json.dumps(info), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "text",
    [None, "", "[]", "{}", '{"type": "gdch"}', '{"type": "service_account", "private_key": "secret-text"}'],
)
def test_a_credentials_file_that_is_of_no_use(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "key.json").write_text(text, encoding="utf-8")
    wrong = settings("127.0.0.1:1", insecure=False, credentials_file="key.json")
    with GcpKms.from_settings(wrong, tmp_path) as kms:
        error = failure(lambda: wrap_one(kms, CANARY, "one"))
    assert isinstance(error, KmsConfigurationError) and "credentials_file" in str(error)
    assert "secret-text" not in str(error)


class TokenService:
    """Answers like Google's token service and its IAM Credentials API."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, url: str, method: str = "GET", body: Any = None, headers: Any = None, **more: Any) -> Any:
        if "allowedLocations" not in url:  # Newer SDKs request these as well, in a thread, some time later.
            self.asked.append((url, {"headers": headers, "body": body, **more}))
        answer = {"access_token": "source-token", "expires_in": 3600}
        if "iamcredentials" in url:
            expiry = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
            answer = {"accessToken": "target-token", "expireTime": expiry.strftime("%Y-%m-%dT%H:%M:%SZ")}
        data = json.dumps(answer).encode()
        return type("Response", (), {"status": 200, "data": data, "headers": {}})()


def test_impersonation(tmp_path: Path) -> None:
    path, service = service_account_file(tmp_path), TokenService()
    target, between = "reader@test-project.example", "between@test-project.example"
    tokens = TokenSource(load_credentials(path, target, [between], "payer"), service)
    assert not tokens.is_fresh
    headers = dict(tokens.headers("https://cloudkms.googleapis.com/", 3.5))
    assert headers["authorization"] == "Bearer target-token"
    assert headers["x-goog-user-project"] == "payer"
    assert tokens.is_fresh and tokens.email == target
    impersonating = [more for url, more in service.asked if target in url and "generateAccessToken" in url]
    assert len(impersonating) == 1 and between in str(impersonating[0]["body"])
    assert all(2 < more["timeout"] <= 3.5 for _, more in service.asked)
    tokens.headers("https://cloudkms.googleapis.com/", 3.5)
    assert len(service.asked) == 2


def test_a_users_credentials_file(tmp_path: Path) -> None:
    info = {"type": "authorized_user", "client_id": "c", "client_secret": "s", "refresh_token": "r"}
    (tmp_path / "user.json").write_text(json.dumps(info), encoding="utf-8")
    tokens = TokenSource(load_credentials(tmp_path / "user.json", None, [], None), TokenService())
    assert dict(tokens.headers("https://cloudkms.googleapis.com/", 3))["authorization"] == "Bearer source-token"
    assert tokens.email is None


def certificate(folder: Path, host: str) -> tuple[grpc.ServerCredentials, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    chain = made.public_bytes(serialization.Encoding.PEM)
    (folder / "ca.pem").write_bytes(chain)
    return grpc.ssl_server_credentials([(pem, chain)]), folder / "ca.pem"


TLS_PROGRAM = """
import sys
from pathlib import Path
from parquet_keytools.errors import KmsError
from parquet_keytools.kms.contract_tests import unwrap_one, wrap_one
from parquet_keytools.kms.contract_tests import CANARY
from parquet_keytools.kms.gcp import GcpKms, GcpSettings

folder, name, *endpoints = sys.argv[1:]
for endpoint in endpoints:
    settings = GcpSettings(
        endpoint=endpoint, credentials_file="account.json", quota_project="payer", timeout_seconds=5, max_tries=2
    )
    with GcpKms(settings, folder=Path(folder)) as kms:
        try:
            assert unwrap_one(kms, wrap_one(kms, CANARY, name), name) == CANARY
            print("done", kms._principal())
        except KmsError as error:
            print(type(error).__name__)
"""


def test_tls_and_a_service_account(tmp_path: Path) -> None:
    service_account_file(tmp_path)
    servers, authorities = [], []
    for number, host in enumerate(("127.0.0.1", "127.0.0.1", "127.0.0.2")):
        folder = tmp_path / str(number)
        folder.mkdir()
        credentials, authority = certificate(folder, host)
        servers.append(FakeGcpKms(credentials))
        servers[-1].add_key("one")
        authorities.append(authority.read_bytes())
    trusted, untrusted, of_another_host = servers
    # Nobody vouches for the second server.
    (tmp_path / "ca.pem").write_bytes(authorities[0] + authorities[2])
    environment = os.environ | {"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(tmp_path / "ca.pem")}
    command = [sys.executable, "-c", TLS_PROGRAM, str(tmp_path), f"{KEY_RING}/cryptoKeys/one"]
    command += [server.endpoint for server in servers]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    for server in servers:
        server.stop()
    expected = ["done writer@test-project.iam.gserviceaccount.com", *["KmsUnavailableError"] * 2]
    assert done.stdout.splitlines() == expected, done.stderr
    assert all(call["authorization"].startswith("Bearer ey") for call in trusted.metadata)
    assert all(call["x-goog-user-project"] == "payer" for call in trusted.metadata)
    assert not untrusted.calls and not of_another_host.calls


def test_who_we_are(server: FakeGcpKms, tmp_path: Path) -> None:
    path = service_account_file(tmp_path)
    kms = GcpKms(settings(server.endpoint, insecure=False, credentials_file=path, max_tries=1))
    assert kms._principal() == "application default credentials"
    with pytest.raises(KmsUnavailableError):  # the server has no TLS
        wrap_one(kms, CANARY, "one")
    assert kms._principal() == "writer@test-project.iam.gserviceaccount.com"
    kms.close()
    other = {"credentials_file": path, "impersonate_service_account": "reader@test-project.example"}
    kms = GcpKms(settings(server.endpoint, insecure=False, **other))
    assert kms._principal() == "reader@test-project.example"
    kms.close()


# --- end to end ---


def test_flights(tmp_path: Path) -> None:
    flights = read_flights().slice(0, 20_000)
    with fake_gcp_kms("footer", "pii", "times") as server:
        configuration = {
            "version": 1,
            "kms": settings(server.endpoint).model_dump(exclude_none=True, mode="json"),
            "master_keys": {"pii": f"{KEY_RING}/cryptoKeys/pii"},
            "tables": {
                "flights": {
                    "footer_key": "footer",
                    "column_keys": {"pii": ["tailnum"], "times": ["dep_time", "arr_time", "*_delay"]},
                    "unlisted_columns": "plaintext",
                }
            },
        }
        with Keytools.from_mapping(configuration) as keytools:
            path = tmp_path / "flights.parquet"
            keytools.write_table(flights, path)
            assert server.calls == {"Encrypt": 3}
        with Keytools.from_mapping(configuration) as keytools:
            back = pq.read_table(path, decryption_properties=keytools.decryption_properties(path))
            assert back.equals(flights)
            assert server.calls == {"Encrypt": 3, "Decrypt": 3}
            keytools.clear_caches()
            server.deny("pii")
            with pytest.raises(Exception, match="access denied"):
                keytools.read_table(path)
            assert keytools.read_table(path, columns=["dep_time"]).num_rows == 20_000


def test_random_keys_differ(kms: GcpKms) -> None:
    key = SecretBytes.random(256)
    assert wrap_one(kms, key, "one") != wrap_one(kms, key, "one")


def test_keys_of_other_projects_are_refused_unless_they_are_named() -> None:
    """A file may name a key of an attacker's project that everybody may decrypt with."""
    theirs = "projects/attacker/locations/global/keyRings/open/cryptoKeys/all"
    with fake_gcp_kms("one") as server, GcpKms(settings(server.endpoint)) as kms:
        wrapped_key = wrap_one(kms, CANARY, "one")
        kms.trust(["two"])
        assert unwrap_one(kms, wrapped_key, "one") == CANARY
        assert unwrap_one(kms, wrapped_key, f"{KEY_RING}/cryptoKeys/one") == CANARY
        with pytest.raises(MasterKeyNotTrustedError):
            unwrap_one(kms, wrapped_key, theirs)
        kms.trust([theirs])
        with pytest.raises(MasterKeyNotFoundError):
            unwrap_one(kms, wrapped_key, theirs)


def test_when_versions_were_created(server: FakeGcpKms, kms: GcpKms) -> None:
    key = server.keys[f"{KEY_RING}/cryptoKeys/one"]
    key.add_version()
    key.versions[0].state = State.DESTROYED
    assert {name: date.timestamp() for name, date in kms.version_dates("one").items()} == {
        "1": 1_700_000_001,
        "2": 1_700_000_002,
    }
