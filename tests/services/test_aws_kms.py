"""AWS KMS: the contract over moto and over a fake of our own, and what happens when things go wrong."""

from __future__ import annotations

import base64
import io
import json
import logging
import multiprocessing
import os
import pickle
import re
import socket
import ssl
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aws_fake import (
    ACCOUNT,
    REGION,
    FakeKms,
    Fault,
    Key,
    changed,
    cut,
    hang_up,
    html,
    redirect,
    refuse,
    serve,
    slow,
)
from moto_server import moto_server
from pydantic import ValidationError
from soak import SecondForm

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
    TableMismatchError,
    WrappedKeyInvalidError,
)
from parquet_keytools.kms.aws import AwsKms, AwsSettings
from parquet_keytools.kms.client import KmsClient, MasterKeyDescription, UnwrapRequest, WrapRequest
from parquet_keytools.kms.contract_tests import CANARY, KmsClientContract, rewrap_one, unwrap_one, wrap_one
from parquet_keytools.secret_bytes import SecretBytes

SECRET_KEY = "CANARY/of+the/secret/access/key/0123456789"
SESSION_TOKEN = "CANARY-of-the-session-token"
SERVED_SECRET = "CANARY-in-an-answer"
DOCUMENTATION = Path(__file__).parents[2] / "docs" / "kms-aws.md"


def settings(url: str, **fields: Any) -> AwsSettings:
    return AwsSettings.model_validate(
        {
            "region": REGION,
            "endpoint_url": url,
            "access_key_id": "AKIAEXAMPLE",
            "secret_access_key": SECRET_KEY,
            "session_token": SESSION_TOKEN,
            # A busy machine answers late: an additional attempt would fail tests that count them.
            "call_timeout_seconds": 15.0,
            "timeout_seconds": 30.0,
        }
        | fields
    )


@pytest.fixture(autouse=True)
def _no_credentials_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def fake() -> FakeKms:
    return FakeKms()


@pytest.fixture
def url(fake: FakeKms) -> Iterator[str]:
    with serve(fake) as url:
        yield url


@pytest.fixture
def kms(url: str) -> Iterator[AwsKms]:
    with AwsKms(settings(url)) as kms:
        yield kms


# --- the contract, over the fake ---


class TestAwsKmsOverFake(KmsClientContract):
    """All cases, for master keys named by ARN."""

    @pytest.fixture(autouse=True)
    def _service(self, fake: FakeKms) -> None:
        self.service = fake
        self.one, self.two = fake.add_key("one"), fake.add_key("two")

    @pytest.fixture
    def kms(self, url: str) -> Iterator[KmsClient]:
        with AwsKms.from_settings(settings(url), Path()) as kms:
            yield kms

    @pytest.fixture
    def master_key_id(self) -> str:
        return self.one.arn

    @pytest.fixture
    def other_master_key_id(self) -> str:
        return self.two.arn

    @pytest.fixture
    def unknown_master_key_id(self) -> str:
        return self.one.arn[:-12] + "0" * 12

    def disable_key(self, kms: KmsClient, master_key_id: str) -> None:
        self.service.find(master_key_id).state = "Disabled"

    def deny_key(self, kms: KmsClient, master_key_id: str) -> None:
        self.service.find(master_key_id).denied.add("*")

    def add_version(self, kms: KmsClient, master_key_id: str) -> None:
        self.service.find(master_key_id).rotate()


class TestAwsKmsOverFakeByAlias(SecondForm, TestAwsKmsOverFake):
    """The same for master keys named by alias."""

    @pytest.fixture
    def master_key_id(self) -> str:
        return "alias/one"

    @pytest.fixture
    def other_master_key_id(self) -> str:
        return f"arn:aws:kms:{REGION}:{ACCOUNT}:alias/two"

    @pytest.fixture
    def unknown_master_key_id(self) -> str:
        return "alias/no-such-alias"


# --- the contract, over moto ---


@pytest.fixture(scope="module")
def moto_url() -> Iterator[str]:
    with moto_server() as url:
        yield url


def moto_client(url: str, service: str = "kms") -> Any:
    client: Any = boto3.client
    return client(service, region_name=REGION, endpoint_url=url, aws_access_key_id="a", aws_secret_access_key="b")


MOTO_ACCOUNT = "123456789012"
MOTO_DOES_NOT = "moto does not do this as AWS does; it runs over the fake"


class TestAwsKmsOverMoto(SecondForm, KmsClientContract):
    @pytest.fixture(autouse=True)
    def _service(self, moto_url: str) -> None:
        self.client = moto_client(moto_url)
        self.one, self.two = (self.client.create_key()["KeyMetadata"]["Arn"] for _ in range(2))

    @pytest.fixture
    def kms(self, moto_url: str) -> Iterator[KmsClient]:
        with AwsKms.from_settings(settings(moto_url, session_token=None), Path()) as kms:
            yield kms

    @pytest.fixture
    def master_key_id(self) -> str:
        return str(self.one)

    @pytest.fixture
    def other_master_key_id(self) -> str:
        return str(self.two)

    @pytest.fixture
    def unknown_master_key_id(self) -> str:
        return str(self.one)[:-12] + "0" * 12

    def disable_key(self, kms: KmsClient, master_key_id: str) -> None:
        self.client.disable_key(KeyId=master_key_id.rpartition("/")[2])
        assert not kms.describe(master_key_id).enabled
        pytest.skip(f"disabled keys still encrypt: {MOTO_DOES_NOT}")

    @pytest.mark.skip(reason=MOTO_DOES_NOT)
    def test_wraps_with_the_master_key_asked_for(self) -> None: ...

    @pytest.mark.skip(reason=MOTO_DOES_NOT)
    def test_refuses_a_damaged_wrapped_key(self) -> None: ...

    @pytest.mark.skip(reason=MOTO_DOES_NOT)
    def test_rewraps_to_another_master_key(self) -> None: ...

    def add_version(self, kms: KmsClient, master_key_id: str) -> None:
        self.client.rotate_key_on_demand(KeyId=master_key_id)


def test_a_role_is_assumed(fake: FakeKms, url: str, moto_url: str) -> None:
    arn = fake.add_key().arn
    role = {
        "role_arn": f"arn:aws:iam::{MOTO_ACCOUNT}:role/flights-writer",
        "external_id": SERVED_SECRET,
        "endpoint_url": moto_url,
    }
    with AwsKms(settings(url, session_token=None, assume_role=role)) as kms:
        wrapped_key = wrap_one(kms, CANARY, arn)
        assert unwrap_one(kms, wrapped_key, arn) == CANARY
        assert kms._principal() == f"arn:aws:iam::{MOTO_ACCOUNT}:role/flights-writer/parquet-keytools"
    assert len(fake.authorizations) == 2
    for authorization in fake.authorizations:
        assert "AKIAEXAMPLE" not in authorization and "x-amz-security-token" in authorization
    assert SERVED_SECRET not in repr(kms.limits)


def test_a_role_that_may_not_be_assumed_is_no_denied_key(
    fake: FakeKms, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    key = fake.add_key()
    with serve_sts(403, "AccessDenied") as (sts_url, asked):
        role = {"role_arn": f"arn:aws:iam::{ACCOUNT}:role/other", "endpoint_url": sts_url}
        with AwsKms(settings(url, assume_role=role)) as kms, pytest.raises(KmsConfigurationError) as caught:
            wrap_one(kms, CANARY, key.arn)
    assert "may not be assumed" in str(caught.value) and asked == ["AssumeRole"]
    # The SDK warns, with the answer's text in a traceback.
    assert "mandatory refresh" in caplog.text and SERVED_SECRET not in caplog.text
    assert not fake.log


def test_a_silent_sts_is_waited_for_no_longer_than_a_call_lasts(fake: FakeKms, url: str) -> None:
    """The SDK would let each thread call STS in turn, and wait for all before it."""
    key = fake.add_key()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(100)
        role = {
            "role_arn": f"arn:aws:iam::{ACCOUNT}:role/r",
            "endpoint_url": f"http://127.0.0.1:{silent.getsockname()[1]}",
        }
        limits = {"call_timeout_seconds": 0.5, "timeout_seconds": 1.0}
        with AwsKms(settings(url, assume_role=role, **limits)) as kms:
            start = time.monotonic()
            outcomes = kms.wrap_many([WrapRequest(CANARY, key.arn) for _ in range(32)])
            # In turn they would take 16 seconds.
            assert time.monotonic() - start < 8
    assert {type(outcome) for outcome in outcomes} == {KmsUnavailableError}
    assert not fake.log


def test_keys_do_not_go_in_plaintext_through_a_proxy_of_the_environment(
    fake: FakeKms, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    key = fake.add_key()
    with AwsKms(settings(url)) as kms:
        assert unwrap_one(kms, wrap_one(kms, CANARY, key.arn), key.arn) == CANARY


def serve_sts(status: int, code: str) -> Any:
    import threading
    from contextlib import contextmanager
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from urllib.parse import parse_qs

    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            asked.append(parse_qs(body)["Action"][0])
            text = f"<Error><Code>{code}</Code><Message>{SERVED_SECRET}</Message></Error>"
            text = f"<ErrorResponse>{text}</ErrorResponse>"
            self.send_response(status)
            self.send_header("Content-Type", "text/xml")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    @contextmanager
    def run() -> Iterator[tuple[str, list[str]]]:
        server = HTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    return run()


# --- what each answer means, and how many attempts it gets ---


class DebugLog(logging.Handler):
    """Keeps the text of every record of the process, tracebacks included."""

    def __init__(self) -> None:
        super().__init__(0)
        self.stream = io.StringIO()

    def emit(self, record: logging.LogRecord) -> None:
        self.stream.write(self.format(record) + "\n" + repr(record.args) + "\n")


@pytest.fixture
def debug_log() -> Iterator[DebugLog]:
    handler = DebugLog()
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(1)
    yield handler
    root.removeHandler(handler)
    root.setLevel(before)


def shows_canary(text: str) -> bool:
    data = CANARY.reveal()
    return any(form in text for form in (data.hex()[:16], base64.b64encode(data).decode()[:16], repr(data)[2:-1]))


def assert_nothing_leaked(*texts: str) -> None:
    for text in texts:
        assert not shows_canary(text)
        for secret in (SECRET_KEY, SESSION_TOKEN, SERVED_SECRET):
            assert secret not in text


ENCODED = base64.b64encode(CANARY.reveal()).decode()

SLOW = slow(1.0)
FAULTS: list[tuple[str, Fault, type[KmsError], int]] = [
    ("access", refuse("AccessDeniedException", message=SERVED_SECRET), KmsAccessDeniedError, 1),
    ("grant", refuse("InvalidGrantTokenException"), KmsAccessDeniedError, 1),
    ("not_found", refuse("NotFoundException", message=SERVED_SECRET), MasterKeyNotFoundError, 1),
    ("arn", refuse("InvalidArnException"), MasterKeyNotFoundError, 1),
    ("disabled", refuse("DisabledException"), MasterKeyDisabledError, 1),
    ("state", refuse("KMSInvalidStateException", message=SERVED_SECRET), MasterKeyDisabledError, 1),
    ("ciphertext", refuse("InvalidCiphertextException", message=ENCODED), WrappedKeyInvalidError, 1),
    ("other_key", refuse("IncorrectKeyException"), WrappedKeyInvalidError, 1),
    ("usage", refuse("InvalidKeyUsageException"), KmsConfigurationError, 1),
    ("validation", refuse("ValidationException", message=ENCODED), KmsConfigurationError, 1),
    ("dry_run", refuse("DryRunOperationException"), KmsResponseInvalidError, 3),
    ("unknown_client", refuse("UnrecognizedClientException"), KmsConfigurationError, 1),
    ("token_id", refuse("InvalidClientTokenId", 403), KmsConfigurationError, 1),
    ("signature", refuse("SignatureDoesNotMatch", 403, SERVED_SECRET), KmsConfigurationError, 1),
    ("expired", refuse("ExpiredTokenException"), KmsConfigurationError, 2),
    ("unavailable_key", refuse("KeyUnavailableException", 500), KmsUnavailableError, 4),
    ("dependency", refuse("DependencyTimeoutException", 500), KmsUnavailableError, 4),
    ("internal", refuse("KMSInternalException", 500), KmsUnavailableError, 4),
    ("xks", refuse("XksProxyUriUnreachableException"), KmsUnavailableError, 4),
    ("xks_credential", refuse("XksProxyIncorrectAuthenticationCredentialException"), KmsConfigurationError, 1),
    ("throttled", refuse("ThrottlingException", message=SERVED_SECRET), KmsThrottledError, 4),
    ("limit", refuse("LimitExceededException"), KmsThrottledError, 4),
    ("too_many", html(429, SERVED_SECRET), KmsThrottledError, 4),
    ("html_502", html(502, ENCODED), KmsUnavailableError, 4),
    ("html_503", html(503, SERVED_SECRET), KmsUnavailableError, 4),
    ("html_403", html(403, SERVED_SECRET), KmsResponseInvalidError, 3),
    ("html_200", html(200, ENCODED), KmsResponseInvalidError, 3),
    ("unknown_code", refuse(SERVED_SECRET, message=ENCODED), KmsResponseInvalidError, 3),
    ("hang_up", hang_up, KmsUnavailableError, 4),
    ("cut", cut, KmsResponseInvalidError, 3),
    ("no_key_id", changed(KeyId=None), KmsResponseInvalidError, 3),
    ("key_id_no_text", changed(KeyId=[SERVED_SECRET]), KmsResponseInvalidError, 3),
    ("key_id_no_arn", changed(KeyId=SERVED_SECRET), KmsResponseInvalidError, 3),
    ("no_plaintext", changed(Plaintext=None), KmsResponseInvalidError, 3),
    ("plaintext_no_base64", changed(Plaintext=ENCODED[:-3]), KmsResponseInvalidError, 3),
    ("plaintext_short", changed(Plaintext=ENCODED[:12]), KmsResponseInvalidError, 3),
    ("plaintext_long", changed(Plaintext=ENCODED[:40] + ENCODED), KmsResponseInvalidError, 3),
    ("slow", SLOW, KmsUnavailableError, 4),
]


@pytest.mark.parametrize(("fault", "kind", "tries"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_each_fault_ends_in_its_class(
    fake: FakeKms, url: str, debug_log: DebugLog, fault: Fault, kind: type[KmsError], tries: int
) -> None:
    """With the attempts that its class allows, in time, and without leaks."""
    key = fake.add_key()
    # On a busy machine, an attempt that is not meant to be slow must not cause another one.
    limits = {"call_timeout_seconds": 0.5 if fault is SLOW else 15.0, "timeout_seconds": 60.0, "max_tries": 4}
    with AwsKms(settings(url)) as kms:
        wrapped_key = wrap_one(kms, CANARY, key.arn)
    with AwsKms(settings(url, **limits)) as kms:
        calls = len(fake.authorizations)
        fake.always = fault
        started = time.monotonic()
        with pytest.raises(KmsError) as caught:
            unwrap_one(kms, wrapped_key, key.arn)
        seconds = time.monotonic() - started
        error = caught.value
        assert type(error) is kind
        assert (error.backend, error.operation, error.master_key_id) == ("aws", "unwrap", key.arn)
        assert len(fake.authorizations) - calls == tries
        # New credentials replace expired ones within one attempt.
        assert error.tries == (1 if "expired" in str(error) else tries)
        assert seconds < limits["timeout_seconds"]
        assert error.__cause__ is error.__context__ is None
        printed = "".join(traceback.format_exception(error))
        pickled = str(pickle.dumps(error))
        log = debug_log.stream.getvalue()
        assert_nothing_leaked(str(error), repr(error), printed, pickled, repr(vars(error)), repr(kms), log)
        fake.always = None
        assert unwrap_one(kms, wrapped_key, key.arn) == CANARY


@pytest.mark.parametrize(
    "fault",
    [refuse("ThrottlingException"), hang_up, html(503), cut],
    ids=["throttled", "hung up", "html", "cut"],
)
def test_what_goes_by_is_waited_for(fake: FakeKms, kms: AwsKms, fault: Fault) -> None:
    key = fake.add_key()
    wrapped_key = wrap_one(kms, CANARY, key.arn)
    fake.faults = [fault, fault]
    assert unwrap_one(kms, wrapped_key, key.arn) == CANARY
    assert fake.counts["Decrypt"] == 3


def test_retry_after_is_kept(fake: FakeKms, kms: AwsKms) -> None:
    key = fake.add_key()
    headers: dict[str, Any] = {"Retry-After": "1"}
    fake.faults = [refuse("ThrottlingException", **headers)]
    started = time.monotonic()
    wrap_one(kms, CANARY, key.arn)
    assert time.monotonic() - started >= 1


def test_a_slow_kms_is_given_up_in_time(fake: FakeKms, url: str) -> None:
    """Neither one attempt nor all of them exceed their time limit."""
    key = fake.add_key()
    fake.always = slow(20)
    with AwsKms(settings(url, call_timeout_seconds=1.0, timeout_seconds=2.5, max_tries=100)) as kms:
        started = time.monotonic()
        with pytest.raises(KmsUnavailableError):
            wrap_one(kms, CANARY, key.arn)
        assert time.monotonic() - started < 10


def test_a_try_gets_no_more_than_the_time_that_is_left(fake: FakeKms, url: str) -> None:
    key = fake.add_key()
    fake.always = slow(20)
    with AwsKms(settings(url, call_timeout_seconds=20.0, timeout_seconds=1.0)) as kms:
        started = time.monotonic()
        with pytest.raises(KmsUnavailableError):
            wrap_one(kms, CANARY, key.arn)
        assert time.monotonic() - started < 10


def test_nobody_listens(fake: FakeKms) -> None:
    with serve(fake) as url:
        pass
    with AwsKms(settings(url, max_tries=3)) as kms, pytest.raises(KmsUnavailableError) as caught:
        wrap_one(kms, CANARY, str(fake.add_key().arn))
    assert caught.value.tries == 3


@pytest.mark.parametrize("fault", ["hang_up", "throttled", "html"])
def test_nothing_leaks_while_wrapping_and_rewrapping(
    fake: FakeKms, url: str, debug_log: DebugLog, fault: str
) -> None:
    one, two = fake.add_key(), fake.add_key()
    with AwsKms(settings(url, max_tries=2)) as kms:
        wrapped_key = wrap_one(kms, CANARY, one.arn)
        fake.always = {"hang_up": hang_up, "throttled": refuse("Throttling"), "html": html(500, ENCODED)}[fault]
        for call in (
            lambda: wrap_one(kms, CANARY, one.arn),
            lambda: rewrap_one(kms, wrapped_key, one.arn, two.arn),
        ):
            with pytest.raises(KmsError) as caught:
                call()
            assert_nothing_leaked(str(caught.value), "".join(traceback.format_exception(caught.value)))
    assert_nothing_leaked(debug_log.stream.getvalue())


def test_the_log_of_others_stays_as_it_is(fake: FakeKms, url: str, debug_log: DebugLog) -> None:
    """Only our calls are silent: other clients of the process log what they always did."""
    key = fake.add_key()
    with AwsKms(settings(url)) as kms:
        wrap_one(kms, CANARY, key.arn)
        assert "botocore.endpoint" not in debug_log.stream.getvalue()
    client = moto_client(url)
    client.encrypt(KeyId=key.arn, Plaintext=b"not ours")
    assert "Making request for OperationModel(name=Encrypt)" in debug_log.stream.getvalue()
    with AwsKms(AwsSettings(), client=client) as kms:
        debug_log.stream.truncate(0)
        unwrap_one(kms, wrap_one(kms, CANARY, key.arn), key.arn)
        assert_nothing_leaked(debug_log.stream.getvalue())


# --- redirects and TLS ---


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(fake: FakeKms, url: str, status: int) -> None:
    key, elsewhere = fake.add_key(), FakeKms()
    elsewhere.keys = fake.keys
    with serve(elsewhere) as other_url, AwsKms(settings(url)) as kms:
        wrapped_key = wrap_one(kms, CANARY, key.arn)
        fake.always = redirect(other_url, status)
        # On 303 the SDK itself fails.
        with pytest.raises(KmsResponseInvalidError, match=r"redirect|the SDK cannot read it"):
            unwrap_one(kms, wrapped_key, key.arn)
        assert fake.counts["Decrypt"] == 3
        assert not elsewhere.authorizations


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 with its key, in one PEM file."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fake KMS")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path_factory.mktemp("tls") / "certificate.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return file


def test_https_is_checked_and_not_left(fake: FakeKms, url: str, certificate: Path) -> None:
    """A certificate that is not trusted, and a redirect from https to http, both end the call."""
    key, secure = fake.add_key(), FakeKms()
    secure.keys = fake.keys
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with serve(secure, context) as secure_url:
        with AwsKms(settings(secure_url)) as kms, pytest.raises(KmsConfigurationError, match="not trusted"):
            wrap_one(kms, CANARY, key.arn)
        bundle = settings(secure_url, ca_bundle=certificate.name)
        with AwsKms(bundle, folder=certificate.parent) as kms:
            wrapped_key = wrap_one(kms, CANARY, key.arn)
            secure.always = redirect(url)
            with pytest.raises(KmsResponseInvalidError, match="redirect"):
                unwrap_one(kms, wrapped_key, key.arn)
    assert not fake.authorizations


# --- which key ---


def test_an_answer_about_another_key_is_refused(fake: FakeKms, kms: AwsKms) -> None:
    one, two = fake.add_key("one"), fake.add_key("two")
    for name in (one.arn, one.key_id, "alias/one"):
        wrapped_key = wrap_one(kms, CANARY, name)
        fake.always = lambda operation, request, reply: (
            reply if operation == "DescribeKey" else changed(KeyId=two.arn)(operation, request, reply)
        )
        for call in (lambda: wrap_one(kms, CANARY, name), lambda: unwrap_one(kms, wrapped_key, name)):  # noqa: B023
            with pytest.raises(KmsResponseInvalidError, match="another master key") as caught:
                call()
            assert caught.value.tries == 3
        with pytest.raises(KmsResponseInvalidError):
            rewrap_one(kms, wrapped_key, name)
        fake.always = changed(SourceKeyId=two.arn)
        with pytest.raises(KmsResponseInvalidError):
            rewrap_one(kms, wrapped_key, name)
        fake.always = None


@pytest.mark.parametrize(
    "blob", [None, "", base64.b64encode(bytes(6_145)).decode()], ids=["none", "empty", "long"]
)
def test_an_answer_without_a_wrapped_key_is_refused(fake: FakeKms, kms: AwsKms, blob: str | None) -> None:
    """Otherwise a file would be written, or rotated, whose keys are lost."""
    key = fake.add_key("one")
    wrapped_key = wrap_one(kms, CANARY, key.arn)
    fake.always = changed(CiphertextBlob=blob)
    for call in (lambda: wrap_one(kms, CANARY, key.arn), lambda: rewrap_one(kms, wrapped_key, key.arn)):
        with pytest.raises(KmsResponseInvalidError, match="it contains no wrapped key"):
            call()


def test_an_alias_is_resolved_once(fake: FakeKms, kms: AwsKms) -> None:
    fake.add_key("one")
    for _ in range(5):
        assert unwrap_one(kms, wrap_one(kms, CANARY, "alias/one"), "alias/one") == CANARY
    assert fake.counts == {"Encrypt": 5, "Decrypt": 5, "DescribeKey": 1}


def test_an_alias_needs_no_permission_to_describe(fake: FakeKms, kms: AwsKms) -> None:
    key = fake.add_key("one")
    key.denied = {"DescribeKey"}
    for _ in range(5):
        assert unwrap_one(kms, wrap_one(kms, CANARY, "alias/one"), "alias/one") == CANARY
    assert fake.counts["DescribeKey"] == 1


def test_an_alias_that_was_moved(fake: FakeKms, kms: AwsKms) -> None:
    """New keys are wrapped with the new key; old keys need the name of the old one, and the error says so."""
    old, new = fake.add_key("one"), fake.add_key()
    wrapped_key = wrap_one(kms, CANARY, "alias/one")
    fake.aliases["alias/one"] = new.key_id
    assert unwrap_one(kms, wrap_one(kms, CANARY, "alias/one"), new.arn) == CANARY
    with pytest.raises(WrappedKeyInvalidError, match="name the key by its ARN") as caught:
        unwrap_one(kms, wrapped_key, "alias/one")
    assert "another master key wrapped it" in str(caught.value)
    assert unwrap_one(kms, rewrap_one(kms, wrapped_key, old.arn, "alias/one"), "alias/one") == CANARY


def test_a_replica_of_a_multi_region_key(fake: FakeKms, kms: AwsKms) -> None:
    """A file names the key of the region that wrote it; the reader's region has its own."""
    key = fake.add_key(key_id="mrk-" + "0123456789abcdef" * 2)
    elsewhere = key.arn.replace(REGION, "us-east-1")
    wrapped_key = wrap_one(kms, CANARY, key.arn)
    assert unwrap_one(kms, wrapped_key, elsewhere) == unwrap_one(kms, wrapped_key, key.key_id) == CANARY
    assert unwrap_one(kms, rewrap_one(kms, wrapped_key, elsewhere), elsewhere) == CANARY
    fake.always = changed(KeyId=key.arn.replace(ACCOUNT, "999999999999"))
    with pytest.raises(KmsResponseInvalidError):
        unwrap_one(kms, wrapped_key, elsewhere)


def test_a_master_key_has_one_name(fake: FakeKms, kms: AwsKms) -> None:
    """Any name of a key identifies it; an ARN of a key needs no call."""
    key = fake.add_key("one")
    assert kms.identity(key.arn) == key.arn
    assert not fake.counts
    alias_arn = f"{key.arn.rpartition(':')[0]}:alias/one"
    assert [kms.identity(name) for name in (key.key_id, "alias/one", alias_arn)] == [key.arn] * 3
    assert fake.counts["DescribeKey"] == 3
    replica = fake.add_key(key_id="mrk-" + "0123456789abcdef" * 2)
    assert kms.identity(replica.arn.replace(REGION, "us-east-1")) == replica.arn
    elsewhere = key.arn.replace(REGION, "us-east-1")
    assert kms.identity(elsewhere) == elsewhere


def test_a_master_key_whose_one_name_nobody_says(fake: FakeKms, kms: AwsKms) -> None:
    """An alias that may not be looked up is not treated as another key."""
    key = fake.add_key("one")
    key.denied = {"DescribeKey"}
    assert kms.identity("alias/one") is None
    assert kms.identity("alias/none") is None
    assert kms.identity(key.arn) == key.arn


def test_hints_for_keys_that_are_not_there(fake: FakeKms, kms: AwsKms) -> None:
    key = fake.add_key("pii")
    with pytest.raises(MasterKeyNotFoundError, match="alias/pii"):
        wrap_one(kms, CANARY, "pii")
    # It may come from a file.
    with pytest.raises(MasterKeyNotFoundError) as caught:
        wrap_one(kms, CANARY, "pii\n\x1b[31mforged")
    assert "an alias is written" in str(caught.value) and str(caught.value).isprintable()
    with pytest.raises(MasterKeyNotFoundError, match="It is in us-east-1"):
        wrap_one(kms, CANARY, key.arn.replace(REGION, "us-east-1"))


# --- rewrap, describe, states, contexts ---


def test_rewrap_shows_no_key_to_us(fake: FakeKms, kms: AwsKms) -> None:
    one, two = fake.add_key("one"), fake.add_key("two")
    wrapped_key = wrap_one(kms, CANARY, one.arn)
    fake.log.clear()
    rewrap_one(kms, wrapped_key, one.arn, two.arn)
    assert fake.counts == {"ReEncrypt": 1}
    ((_, request, answer),) = fake.log
    assert (request["SourceKeyId"], request["DestinationKeyId"]) == (one.arn, two.arn)
    assert not shows_canary(json.dumps([request, answer]))


@pytest.mark.parametrize(("denied", "concerned"), [("ReEncryptFrom", 0), ("ReEncryptTo", 1)])
def test_a_refused_rewrap_names_the_key_concerned(fake: FakeKms, kms: AwsKms, denied: str, concerned: int) -> None:
    keys = [fake.add_key(), fake.add_key()]
    wrapped_key = wrap_one(kms, CANARY, keys[0].arn)
    keys[concerned].denied = {denied}
    with pytest.raises(KmsAccessDeniedError) as caught:
        rewrap_one(kms, wrapped_key, keys[0].arn, keys[1].arn)
    assert caught.value.master_key_id == keys[concerned].arn
    keys[concerned].denied, keys[concerned].state = set(), "Disabled"
    with pytest.raises(MasterKeyDisabledError) as disabled:
        rewrap_one(kms, wrapped_key, keys[0].arn, keys[1].arn)
    assert disabled.value.master_key_id == keys[concerned].arn


def test_when_versions_were_created(fake: FakeKms, kms: AwsKms) -> None:
    key = fake.add_key()
    for _ in range(2):
        key.rotate()
    dates = kms.version_dates(key.arn)
    assert set(dates) == {None, *key.material_ids}
    assert dates[None] == dates[key.material_ids[0]]
    assert [dates[name].timestamp() for name in key.material_ids[1:]] == [1_700_000_001, 1_700_000_002]
    key.denied.add("ListKeyRotations")
    assert set(kms.version_dates(key.arn)) == {None}
    with pytest.raises(MasterKeyNotFoundError):
        kms.version_dates(key.arn[:-1] + "x")


def test_describe(fake: FakeKms, kms: AwsKms) -> None:
    key = fake.add_key("one")
    found = kms.describe("alias/one")
    expected = MasterKeyDescription(
        "alias/one",
        enabled=True,
        current_version=key.material_ids[0],
        origin="AWS_KMS",
        rotates=True,
    )
    assert found == expected
    key.rotate()
    assert kms.describe(key.key_id).current_version == key.material_ids[1]
    key.denied = {"GetKeyRotationStatus"}
    assert kms.describe("alias/one") == replace(expected, rotates=None, current_version=key.material_ids[1])
    key.state = "PendingDeletion"
    assert not kms.describe("alias/one").enabled
    with pytest.raises(KmsConfigurationError, match="SYMMETRIC_DEFAULT"):
        kms.describe(fake.add_key(usage="SIGN_VERIFY").arn)


@pytest.mark.parametrize(
    ("state", "kind", "text"),
    [
        ("Disabled", MasterKeyDisabledError, "disabled"),
        ("PendingDeletion", MasterKeyDisabledError, "pending deletion"),
        ("PendingImport", MasterKeyDisabledError, "not imported"),
        ("Unavailable", MasterKeyDisabledError, "not connected"),
        ("Creating", KmsUnavailableError, "being created"),
        ("KeyUnavailable", KmsUnavailableError, "not available now"),
    ],
)
def test_states(fake: FakeKms, url: str, state: str, kind: type[KmsError], text: str) -> None:
    key, other = fake.add_key("disabled-updating"), fake.add_key()
    with AwsKms(settings(url, max_tries=2)) as kms:
        wrapped_key = wrap_one(kms, CANARY, key.arn)
        key.state = state
        calls: list[Callable[[], object]] = [
            lambda: wrap_one(kms, CANARY, key.arn),
            lambda: unwrap_one(kms, wrapped_key, key.arn),
            lambda: rewrap_one(kms, wrapped_key, key.arn, other.arn),
        ]
        for call in calls:
            with pytest.raises(kind, match=text):
                call()


def test_the_encryption_context_is_bound(fake: FakeKms, url: str) -> None:
    one, two = fake.add_key(), fake.add_key()
    context = {"application": "flights", "environment": "test"}
    with AwsKms(settings(url, encryption_context=context)) as kms, AwsKms(settings(url)) as without:
        wrapped_key = rewrap_one(kms, wrap_one(kms, CANARY, one.arn), one.arn, two.arn)
        assert unwrap_one(kms, wrapped_key, two.arn) == CANARY
        with pytest.raises(WrappedKeyInvalidError, match="encryption_context"):
            unwrap_one(without, wrapped_key, two.arn)
    sent = [value for _, request, _ in fake.log for name, value in request.items() if name.endswith("Context")]
    assert sent == [context] * 4 + [{}]


def test_the_raw_form_is_the_blob_of_a_call_without_context(fake: FakeKms, url: str) -> None:
    """So that Iceberg's `AwsKeyManagementClient`, which sends no context, can read it."""
    one = fake.add_key()
    with AwsKms(settings(url)) as kms, AwsKms(settings(url, encryption_context={"a": "b"})) as bound:
        blob = kms.wrap_raw(CANARY, one.arn)
        assert base64.b64encode(blob).decode() != wrap_one(kms, CANARY, one.arn)
        assert unwrap_one(kms, base64.b64encode(blob).decode(), one.arn) == kms.unwrap_raw(blob, one.arn) == CANARY
        calls = len(fake.log)
        for call in (lambda: bound.wrap_raw(CANARY, one.arn), lambda: bound.unwrap_raw(blob, one.arn)):
            with pytest.raises(KmsConfigurationError, match="encryption_context"):
                call()
        assert len(fake.log) == calls
        with pytest.raises(WrappedKeyInvalidError):
            kms.unwrap_raw(blob[:-1], one.arn)
    sent = [value for _, request, _ in fake.log for name, value in request.items() if name.endswith("Context")]
    assert sent == [{}] * len(sent)


# --- credentials ---


def test_expired_credentials_are_read_anew(
    fake: FakeKms, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials"
    key = fake.add_key()

    def write(access_key: str) -> None:
        file.write_text(f"[default]\naws_access_key_id = {access_key}\naws_secret_access_key = {SECRET_KEY}\n")

    write("AKIAOLD")
    options = {"access_key_id": None, "secret_access_key": None, "session_token": None}
    with AwsKms(settings(url, **options)) as kms:
        wrapped_key = wrap_one(kms, CANARY, key.arn)
        fake.expired_access_keys.add("AKIAOLD")
        write("AKIANEW")
        requests = [UnwrapRequest(wrapped_key, key.arn)] * 2
        assert kms.unwrap_many(requests) == [CANARY] * 2
        assert [("AKIANEW" in text) for text in fake.authorizations] == [False, False, True]
        fake.expired_access_keys.add("AKIANEW")
        with pytest.raises(KmsConfigurationError, match="have expired"):
            unwrap_one(kms, wrapped_key, key.arn)
        assert len(fake.authorizations) == 5


def test_no_credentials(fake: FakeKms, url: str) -> None:
    options = {"access_key_id": None, "secret_access_key": None, "session_token": None}
    with AwsKms(settings(url, **options)) as kms, pytest.raises(KmsConfigurationError, match="no usable AWS"):
        wrap_one(kms, CANARY, fake.add_key().arn)
    with AwsKms(settings(url, **options, profile="none")) as kms:
        assert kms._principal() == "profile none"
        with pytest.raises(KmsConfigurationError, match="no such profile"):
            wrap_one(kms, CANARY, fake.add_key().arn)
    with AwsKms(AwsSettings()) as kms, pytest.raises(KmsConfigurationError, match="Set `region`"):
        wrap_one(kms, CANARY, "alias/one")
    assert not fake.authorizations


def test_a_profile(fake: FakeKms, url: str, tmp_path: Path) -> None:
    text = f"[profile writer]\naws_access_key_id = AKIAPROFILE\naws_secret_access_key = {SECRET_KEY}\n"
    (tmp_path / "config").write_text(text, encoding="utf-8")
    options = {"access_key_id": None, "secret_access_key": None, "session_token": None}
    with AwsKms(settings(url, **options, profile="writer")) as kms:
        wrap_one(kms, CANARY, fake.add_key().arn)
    assert "AKIAPROFILE" in fake.authorizations[0]


@pytest.mark.parametrize("place", ["AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "a profile"])
def test_an_empty_ca_bundle_does_not_switch_verification_off(
    fake: FakeKms, certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Some versions of the SDK take it as "verify nothing"."""
    if place == "a profile":
        (tmp_path / "config").write_text("[default]\nca_bundle =\n", encoding="utf-8")
    else:
        monkeypatch.setenv(place, "")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with (
        serve(fake, context) as url,
        AwsKms(settings(url)) as kms,
        pytest.raises(KmsConfigurationError, match="AWS_CA_BUNDLE, REQUESTS_CA_BUNDLE, or ca_bundle"),
    ):
        wrap_one(kms, CANARY, fake.add_key().arn)
    assert not fake.authorizations


@pytest.mark.parametrize("place", ["settings", "environment"])
@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_ca_bundle_that_is_of_no_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, content: str | None
) -> None:
    """This is not an unreachable KMS."""
    file = tmp_path / "bundle.pem"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    if place == "environment":
        monkeypatch.setenv("AWS_CA_BUNDLE", str(file))
    fields = {"ca_bundle": file.name} if place == "settings" else {}
    with (
        AwsKms(settings("https://kms.example.com", **fields), folder=tmp_path) as kms,
        pytest.raises(KmsConfigurationError, match=re.escape(f"{file} cannot be used")) as caught,
    ):
        wrap_one(kms, CANARY, "alias/one")
    assert caught.value.tries == 1


def test_an_endpoint_of_the_environment_is_not_taken_for_fips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", "https://kms.example.com")
    urls: list[str] = []

    def unreachable(request: Any, **_: object) -> None:
        urls.append(request.url)
        raise ConnectionRefusedError

    session = boto3.Session("AKIAEXAMPLE", SECRET_KEY)
    session.events.register("before-send.kms", unreachable)
    fips = AwsSettings(region=REGION, use_fips_endpoint=True, max_tries=1)
    with AwsKms(fips, session=session) as kms, pytest.raises(KmsUnavailableError):
        wrap_one(kms, CANARY, "alias/one")
    assert urls == [f"https://kms-fips.{REGION}.amazonaws.com/"]


def test_an_endpoint_of_the_environment_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", "http://kms.example.com")
    with AwsKms(AwsSettings(region=REGION)) as kms, pytest.raises(KmsConfigurationError, match="https"):
        wrap_one(kms, CANARY, "alias/one")


@pytest.mark.parametrize(
    "fields",
    [
        {"endpoint_url": "http://kms.example.com"},
        {"endpoint_url": "http://127.0.0.1.example.com"},
        {"endpoint_url": "ftp://127.0.0.1"},
        {"endpoint_url": "https://user:CANARY@kms.example.com"},
        {"endpoint_url": "kms.example.com"},
        {"endpoint_url": "https://[", "region": REGION},
        {"access_key_id": "CANARY"},
        {"session_token": "CANARY"},
        {"profile": "p", "access_key_id": "CANARY", "secret_access_key": "CANARY"},
        {"endpoint_url": "https://kms.example.com", "use_fips_endpoint": True},
        {"encryption_context": {"aws:x": "y"}},
        {"encryption_context": {"": "y"}},
        {"encryption_context": {"a": "y" * 9000}},
        {"assume_role": {"role_arn": "CANARY"}},
        {"assume_role": {"role_arn": f"arn:aws:iam::{ACCOUNT}:role/r", "endpoint_url": "http://sts.example.com"}},
        {"region": "https://CANARY"},
    ],
)
def test_wrong_settings(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        AwsSettings.model_validate(fields)
    assert "CANARY" not in str(caught.value)


@pytest.mark.parametrize(
    "endpoint", ["https://kms.example.com", "http://localhost:4566", "http://[::1]:1", "http://127.8.8.8"]
)
def test_right_endpoints(endpoint: str) -> None:
    assert AwsSettings(endpoint_url=endpoint).endpoint_url == endpoint
    assert AwsSettings(endpoint_url="http://localstack:4566", allow_http=True)


def test_settings_show_no_secret() -> None:
    shown = settings(
        "http://127.0.0.1",
        assume_role={"role_arn": f"arn:aws:iam::{ACCOUNT}:role/r", "external_id": SERVED_SECRET},
    )
    assert_nothing_leaked(repr(shown), str(shown), shown.model_dump_json())


# --- sessions, clients, threads, forks ---


def test_a_session_of_the_caller(fake: FakeKms, url: str) -> None:
    session = boto3.Session(aws_access_key_id="AKIASESSION", aws_secret_access_key="b", region_name=REGION)
    key = fake.add_key()
    with AwsKms(AwsSettings(endpoint_url=url), session=session) as kms:
        assert unwrap_one(kms, wrap_one(kms, CANARY, key.arn), key.arn) == CANARY
        assert kms._principal() == "a session of the caller"
    assert "AKIASESSION" in fake.authorizations[0]


def test_a_client_of_the_caller(fake: FakeKms, url: str) -> None:
    client, key = moto_client(url), fake.add_key()
    with AwsKms(client=client) as kms:
        assert unwrap_one(kms, wrap_one(kms, CANARY, key.arn), key.arn) == CANARY
        assert kms._principal() == "a client of the caller"
    client.describe_key(KeyId=key.arn)
    with pytest.raises(ValueError, match="either"):
        AwsKms(client=client, session=boto3.Session())
    role = {"role_arn": f"arn:aws:iam::{ACCOUNT}:role/r"}
    with pytest.raises(ValueError, match="cannot assume a role"):
        AwsKms(settings(url, assume_role=role), client=client)


def test_the_credentials_of_a_client_of_the_caller_are_not_requested_again(fake: FakeKms, url: str) -> None:
    key, client = fake.add_key(), moto_client(url)
    with AwsKms(client=client) as kms:
        wrap_one(kms, CANARY, key.arn)
        sent = len(fake.authorizations)
        fake.always = refuse("ExpiredTokenException")
        with pytest.raises(KmsConfigurationError, match="expired"):
            wrap_one(kms, CANARY, key.arn)
    assert len(fake.authorizations) == sent + 1


def test_a_client_of_the_caller_needs_tls() -> None:
    client = moto_client("http://kms.example.com")
    with AwsKms(client=client) as kms, pytest.raises(KmsConfigurationError, match="without TLS"):
        wrap_one(kms, CANARY, "alias/one")


def test_many_unwraps_over_16_threads(fake: FakeKms, url: str) -> None:
    """As many concurrent calls as the settings say, over as many connections, and no more."""
    key = fake.add_key()
    with AwsKms(settings(url, max_concurrent_calls=8)) as kms:
        keys = [SecretBytes.random(256) for _ in range(100)]
        wrapped = [wrap_one(kms, one, key.arn) for one in keys]
        fake.latency_seconds = 0.02
        with ThreadPoolExecutor(16) as threads:
            assert list(threads.map(lambda text: unwrap_one(kms, text, key.arn), wrapped)) == keys
        assert 2 <= fake.most_at_once <= 8
        fake.most_at_once = 0
        assert kms.unwrap_many([UnwrapRequest(text, key.arn) for text in wrapped]) == keys
        assert 2 <= fake.most_at_once <= 8


def _unwrap_in_child(kms: AwsKms, wrapped_key: str, master_key_id: str, results: Any) -> None:
    results.put(unwrap_one(kms, wrapped_key, master_key_id) == CANARY)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("given", ["settings", "client"])
def test_forked_children_have_their_own_connection(fake: FakeKms, url: str, given: str) -> None:
    key = fake.add_key()
    kms = AwsKms(client=moto_client(url)) if given == "client" else AwsKms(settings(url))
    with kms:
        wrapped_key = wrap_one(kms, CANARY, key.arn)
        fork = multiprocessing.get_context("fork")
        results = fork.Queue()
        children = [
            fork.Process(target=_unwrap_in_child, args=(kms, wrapped_key, key.arn, results)) for _ in range(3)
        ]
        for child in children:
            child.start()
        assert [results.get(timeout=60) for _ in children] == [True] * 3
        for child in children:
            child.join()
        assert unwrap_one(kms, wrapped_key, key.arn) == CANARY


def test_a_closed_client_opens_again(fake: FakeKms, kms: AwsKms) -> None:
    key: Key = fake.add_key()
    wrapped_key = wrap_one(kms, CANARY, key.arn)
    kms.close()
    assert unwrap_one(kms, wrapped_key, key.arn) == CANARY


# --- end to end ---


def test_flights(fake: FakeKms, url: str, tmp_path: Path) -> None:
    """Written with three master keys, read back by ours and by pyarrow; a denied key affects only its columns."""
    flights = read_flights().slice(0, 20_000)
    footer, pii = fake.add_key("footer"), fake.add_key("pii")
    fake.add_key("times")
    document = {
        "version": 1,
        "kms": {
            "type": "aws",
            "region": REGION,
            "endpoint_url": url,
            "access_key_id": "AKIAEXAMPLE",
            "secret_access_key": SECRET_KEY,
            "encryption_context": {"application": "flights"},
        },
        "master_keys": {"footer": footer.arn, "pii": pii.arn, "times": "alias/times"},
        "tables": {
            "flights": {
                "footer_key": "footer",
                "column_keys": {"pii": ["tailnum"], "times": ["dep_time", "arr_time", "time_hour"]},
                "unlisted_columns": "plaintext",
            }
        },
    }
    path = tmp_path / "flights.parquet"
    with Keytools.from_mapping(document) as tools:
        tools.write_table(flights, path)
        assert fake.counts == {"Encrypt": 3, "DescribeKey": 1}
        assert path.read_bytes()[:4] == b"PARE"
        assert b"N14228" not in path.read_bytes()
    fake.log.clear()
    with Keytools.from_mapping(document) as tools:
        found = pq.read_table(path, decryption_properties=tools.decryption_properties(path))
        assert found.equals(flights)
        assert tools.read_table(path).equals(flights)
        assert fake.counts["Decrypt"] == 3
    pii.denied = {"Decrypt"}
    with Keytools.from_mapping(document | {"reading": {"denied_columns": "hide"}}) as tools:
        assert tools.read_table(path).equals(flights.drop_columns(["tailnum"]))
    fake.always = refuse("ExpiredTokenException")
    tools = Keytools.from_mapping(document | {"reading": {"denied_columns": "hide"}})
    with tools, pytest.raises(KmsConfigurationError):
        tools.read_table(path)


def test_a_file_under_the_key_of_somebody_else_is_refused(fake: FakeKms, url: str, tmp_path: Path) -> None:
    """An attacker writes a file under a key in their own account that everybody may use, and puts it in place."""
    ours, theirs = fake.add_key("ours"), fake.add_key("theirs")
    flights = pa.table({"tailnum": ["N14228"]})
    path = tmp_path / "flights.parquet"

    def tools(kms: AwsKms, footer_key: str) -> Keytools:
        return Keytools.from_mapping(
            {
                "version": 1,
                "master_keys": {"footer": footer_key},
                "tables": {"flights": {"footer_key": "footer", "unlisted_columns": "footer_key"}},
            },
            kms=kms,
        )

    with AwsKms(settings(url)) as kms, tools(kms, theirs.arn) as attacker:
        attacker.write_table(flights, path)
    fake.log.clear()
    with AwsKms(settings(url)) as kms, tools(kms, ours.arn) as reader:
        with pytest.raises(TableMismatchError, match="the footer is under the master key 'arn:aws:kms:"):
            reader.read_table(path)
        with pytest.raises(MasterKeyNotTrustedError, match="master_keys"):
            # Code that compares no file with a table stops there.
            unwrap_one(kms, "QUJD", theirs.arn)
        with pytest.raises(MasterKeyNotTrustedError):
            # Their keys are not re-wrapped with ours, either: that would make the file genuine.
            rewrap_one(kms, "QUJD", theirs.arn, ours.arn)
    assert not fake.log


@pytest.mark.parametrize("key_material", ["internal", "external"])
def test_who_names_master_keys_in_a_rotation_trusts_them(
    fake: FakeKms, url: str, tmp_path: Path, key_material: str
) -> None:
    """Neither the old key nor the new one needs to be in the configuration."""
    old, new = fake.add_key("old"), fake.add_key("new")
    flights = pa.table({"tailnum": ["N14228"]})
    path = tmp_path / "flights.parquet"

    def tools(footer_key: str | None) -> Keytools:
        table = {"footer_key": "footer", "unlisted_columns": "plaintext", "key_material": key_material}
        return Keytools.from_mapping(
            {
                "version": 1,
                "kms": settings(url).model_dump(mode="json", exclude_none=True)
                | {"secret_access_key": SECRET_KEY, "session_token": SESSION_TOKEN},
                "master_keys": {"footer": footer_key or "alias/none"},
                # A file that moves must belong to a table, if there is one.
                "tables": {"flights": table} if footer_key is not None else {},
            }
        )

    with tools(old.arn) as writer:
        writer.write_table(flights, path)
    with tools("alias/none") as of_another_table:
        assert not of_another_table.rotate(path, moves={old.arn: new.arn}).succeeded
    with tools(None) as rotator:
        assert not rotator.rotate(path).succeeded
        assert rotator.rotate(path, moves={old.arn: new.arn}).succeeded
    with tools(new.arn) as reader:
        assert reader.read_table(path).equals(flights)


POLICIES = re.findall(r"^```json\n(.*?)^```", DOCUMENTATION.read_text(encoding="utf-8"), re.M | re.S)
ACTIONS = {"Encrypt", "Decrypt", "ReEncryptFrom", "ReEncryptTo", "DescribeKey", "GetKeyRotationStatus"}


def test_documented_policies_suffice(fake: FakeKms, url: str) -> None:
    """A policy of the documentation is enough for its task, even if it allows nothing else."""
    writer, reader, rotator = (
        {action for statement in json.loads(text)["Statement"] for action in statement["Action"]}
        for text in POLICIES
    )
    one, two = fake.add_key("one"), fake.add_key("two")

    def become(allowed: set[str]) -> None:
        assert allowed <= {f"kms:{action}" for action in ACTIONS}
        for key in (one, two):
            key.denied = {action for action in ACTIONS if f"kms:{action}" not in allowed}

    with AwsKms(settings(url)) as kms:
        become(writer)
        wrapped_key = wrap_one(kms, CANARY, "alias/one")
        with pytest.raises(KmsAccessDeniedError):
            unwrap_one(kms, wrapped_key, "alias/one")
        become(rotator)
        wrapped_key = rewrap_one(kms, wrapped_key, "alias/one", "alias/two")
        with pytest.raises(KmsAccessDeniedError):
            unwrap_one(kms, wrapped_key, "alias/two")
        become(reader)
        assert unwrap_one(kms, wrapped_key, "alias/two") == CANARY
        assert kms.describe("alias/two").enabled


def test_documented_errors_are_there() -> None:
    """Each code in the documentation's table ends in the class stated beside it."""
    from botocore.exceptions import ClientError

    from parquet_keytools.kms.aws import aws_error

    section = DOCUMENTATION.read_text(encoding="utf-8").partition("## What errors mean")[2]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", section, re.M)
    assert len(rows) > 10
    checked = 0
    for kind, codes in rows:
        for code in re.findall(r"`(\w+Exception|InvalidClientTokenId|SignatureDoesNotMatch)`", codes):
            error = ClientError({"Error": {"Code": code, "Message": ""}}, "Decrypt")
            found = aws_error(error)
            assert type(found).__name__ == kind and code in str(found)
            checked += 1
    assert checked > 10
