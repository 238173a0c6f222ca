"""The connection to Cloud KMS: its credentials, its requests, and its time limits."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import google.auth
import grpc
import pytest
from faults import TurnedClock
from google.api_core.exceptions import PermissionDenied, Unauthenticated
from google.auth import identity_pool, impersonated_credentials
from google.auth.credentials import TokenState
from google.auth.exceptions import TransportError
from google.auth.transport.requests import Request
from google.oauth2 import credentials as user_credentials
from google.oauth2 import service_account

from parquet_keytools.errors import KmsConfigurationError
from parquet_keytools.kms import gcp as gcp_connection
from parquet_keytools.kms.gcp import (
    GcpConnection,
    GcpSettings,
    TokenSource,
    email_of,
    load_credentials,
    open_client,
)
from parquet_keytools.runtime.threads_and_forks import CallGate

SCOPE = "https://www.googleapis.com/auth/cloud-platform"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> TurnedClock:
    clock = TurnedClock()
    monkeypatch.setattr(gcp_connection, "time", SimpleNamespace(monotonic=clock))
    return clock


# --- settings ---


def test_a_key_ring_has_three_parts() -> None:
    parts = {"project": "example.com:flights-1", "location": "europe-west1", "key_ring": "Ring_1"}
    name = "projects/example.com:flights-1/locations/europe-west1/keyRings/Ring_1"
    assert GcpSettings.model_validate(parts).key_ring_name() == name
    for missing in parts:
        assert GcpSettings.model_validate({**parts, missing: None}).key_ring_name() is None


def test_as_much_is_bound_as_cloud_kms_takes() -> None:
    assert len(GcpSettings(additional_authenticated_data="x" * 65_536).aad()) == 65_536
    with pytest.raises(ValueError, match="65536 bytes"):
        GcpSettings(additional_authenticated_data="x" * 65_537)


@pytest.mark.parametrize("endpoint", ["kms.example", "kms.example:443", "[::1]:8443", "10.0.0.1:80"])
def test_hosts_are_endpoints(endpoint: str) -> None:
    settings = GcpSettings(endpoint=endpoint)
    assert settings.endpoint == endpoint and not settings.insecure


@pytest.mark.parametrize(
    ("fields", "mistake"),
    [
        ({"endpoint": "https://kms.example"}, "without https://"),
        ({"endpoint": "10.0.0.1:80", "insecure": True}, "an endpoint on this machine"),
        ({"endpoint": "127.0.0.1:80", "insecure": True}, ""),
        ({"endpoint": "127.0.0.1:80", "insecure": True, "credentials_file": "f"}, "would be sent without TLS"),
        (
            {"endpoint": "127.0.0.1:80", "insecure": True, "impersonate_service_account": "a@b.example"},
            "would be sent without TLS",
        ),
        ({"credentials_file": "f", "impersonate_service_account": "a@b.example"}, ""),
        ({"impersonation_delegates": ["a@b.example"]}, "needs impersonate_service_account"),
        ({"impersonation_delegates": ["a@b.example"], "impersonate_service_account": "c@b.example"}, ""),
        ({"project": "p/x", "location": "global", "key_ring": "r"}, "do not form the name of a key ring"),
    ],
)
def test_nothing_secret_goes_out_without_tls(fields: dict[str, Any], mistake: str) -> None:
    """Nor to an unintended address, or as an unintended identity."""
    if not mistake:
        assert GcpSettings.model_validate(fields)
        return
    with pytest.raises(ValueError, match=mistake):
        GcpSettings.model_validate(fields)


# --- choice of credentials ---


class Made:
    """Replaces a credentials factory, and records its arguments."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Any]] = []

    def __call__(self, info: Any, *, scopes: Any) -> Any:
        self.asked.append((info, list(scopes)))
        return SimpleNamespace(info=info)


@pytest.mark.parametrize(
    ("kind", "maker"),
    [
        ("authorized_user", user_credentials.Credentials.from_authorized_user_info),
        ("external_account", identity_pool.Credentials.from_info),
        ("service_account", service_account.Credentials.from_service_account_info),
    ],
)
def test_a_file_says_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, maker: Callable[..., Any]
) -> None:
    assert gcp_connection.KINDS[kind] == maker
    made = Made()
    monkeypatch.setitem(gcp_connection.KINDS, kind, made)
    monkeypatch.setattr(google.auth, "default", lambda **_: pytest.fail("those of the machine were taken"))
    info = {"type": kind, "text": "ü"}
    (tmp_path / "file.json").write_text(json.dumps(info, ensure_ascii=False), encoding="utf-8")
    assert load_credentials(tmp_path / "file.json", None, [], None).info == info
    assert made.asked == [(info, [SCOPE])]


def test_why_a_file_is_of_no_use_is_said(tmp_path: Path) -> None:
    for text, reason in (
        (None, "No such file"),
        ("secret-text", "JSONDecodeError"),
        ('["secret-text"]', "its type is none of authorized_user, external_account, service_account"),
        ('{"type": "external_account", "audience": "secret-text"}', "cannot use credentials_file: "),
    ):
        file = tmp_path / "file.json"
        if text is not None:
            file.write_text(text, encoding="utf-8")
        with pytest.raises(KmsConfigurationError, match=reason) as caught:
            load_credentials(file, None, [], None)
        assert caught.value.operation == "connect"
        assert "secret-text" not in str(caught.value) and "GOOGLE_APPLICATION_CREDENTIALS" in caught.value.hint


class OfTheMachine(service_account.Credentials):  # type: ignore[misc]
    def __init__(self, **changes: Any) -> None:
        self.changes = changes

    def with_always_use_jwt_access(self, always: bool) -> Any:
        return OfTheMachine(jwt=always, **self.changes)

    def with_quota_project(self, project: str | None) -> Any:
        return OfTheMachine(quota=project, **self.changes)


def test_else_they_are_those_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def default(*, scopes: Any) -> tuple[Any, str]:
        assert list(scopes) == [SCOPE]
        return OfTheMachine(), "project"

    monkeypatch.setattr(google.auth, "default", default)
    assert load_credentials(None, None, [], None).changes == {"jwt": True}
    assert load_credentials(None, None, [], "payer").changes == {"jwt": True, "quota": "payer"}


def test_who_acts_as_another_one_is_asked_as_oneself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A self-signed token is of no use for the service that issues the other identity's tokens."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(google.auth, "default", lambda **_: (OfTheMachine(), None))
    monkeypatch.setattr(impersonated_credentials, "Credentials", lambda **given: made.append(given) or "other")
    assert load_credentials(None, "reader@p.example", ("a@p.example", "b@p.example"), None) == "other"
    (given,) = made
    assert given.pop("source_credentials").changes == {"jwt": False}
    assert given == {
        "target_principal": "reader@p.example",
        "target_scopes": [SCOPE],
        "delegates": ["a@p.example", "b@p.example"],
    }


@pytest.mark.parametrize(
    ("email", "shown"), [("a@p.example", "a@p.example"), ("default", None), (None, None), (1, None)]
)
def test_who_we_are_is_an_email_or_not_known(email: Any, shown: str | None) -> None:
    found = SimpleNamespace(service_account_email=email, token_state=TokenState.FRESH)
    assert email_of(found) == shown and email_of(object()) is None
    assert TokenSource(found).email == shown


# --- tokens ---


class Renewed:
    """Credentials that request each token, with a timeout of the library's own."""

    def __init__(self, timeout: float | None = 60) -> None:
        self.token: str | None = None
        self.timeout = timeout
        self.urls: list[str] = []
        self.token_state = TokenState.STALE

    def before_request(self, request: Callable[..., Any], method: str, url: str, headers: dict[str, str]) -> None:
        assert method == "POST"
        self.urls.append(url)
        if self.token is None:
            self.token = request(url="https://token.example", timeout=self.timeout)
        headers["Authorization"] = f"Bearer {self.token}"


@pytest.mark.parametrize(("own", "left", "used"), [(60, 5, 5), (None, 5, 5), (2, 5, 2), (60, 0.5, 0.5)])
def test_a_token_is_asked_for_within_the_time_of_the_call(
    clock: TurnedClock, own: float | None, left: float, used: float
) -> None:
    asked: list[Any] = []
    tokens = TokenSource(Renewed(own), lambda **given: asked.append(given) or "one")
    assert tokens.headers("https://kms.example/", left) == [("authorization", "Bearer one")]
    assert asked == [{"url": "https://token.example", "timeout": used}]


def test_without_time_no_token_is_asked_for(clock: TurnedClock) -> None:
    tokens = TokenSource(Renewed(), lambda **_: pytest.fail("it was asked for"))
    with pytest.raises(TransportError):
        tokens.headers("https://kms.example/", 0)


def test_others_who_get_a_token_are_waited_for_no_longer_than_a_call_lasts() -> None:
    asked, answered = threading.Event(), threading.Event()
    requests: list[object] = []

    def slow(**given: object) -> str:
        requests.append(given)
        asked.set()
        assert answered.wait(60)
        return "one"

    tokens = TokenSource(Renewed(), slow)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(tokens.headers, "https://kms.example/", 100)
        assert asked.wait(60)
        try:
            calls: dict[float, Callable[[], object]] = {
                0.3: lambda: tokens.headers("https://kms.example/", 0.3),
                0.2: lambda: tokens.refused((), 0.2),
            }
            for seconds, call in calls.items():
                started = time.monotonic()
                with pytest.raises(TransportError):
                    call()
                assert seconds <= time.monotonic() - started < 30
        finally:
            answered.set()
        assert first.result() == [("authorization", "Bearer one")]
    assert len(requests) == 1


@pytest.mark.parametrize(
    ("state", "fresh"), [(TokenState.FRESH, True), (TokenState.STALE, False), (TokenState.INVALID, False)]
)
def test_what_will_expire_soon_is_not_fresh(state: TokenState, fresh: bool) -> None:
    credentials = Renewed()
    credentials.token_state = state
    assert TokenSource(credentials).is_fresh is fresh
    assert GcpConnection(object(), TokenSource(credentials)).is_ready is fresh
    assert GcpConnection(object(), None).is_ready


def test_tokens_are_asked_for_with_the_library_of_google(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(Request, "__call__", lambda _, url, **given: asked.append(url) or "one")
    assert TokenSource(Renewed()).headers("https://kms.example/", 5) == [("authorization", "Bearer one")]
    assert asked == ["https://token.example"]


def test_a_refused_token_is_dropped_and_not_with_each_call(clock: TurnedClock) -> None:
    credentials = Renewed()
    numbers = iter("123")
    tokens = TokenSource(credentials, lambda **_: next(numbers))
    first = tokens.headers("https://kms.example/", 5)
    assert tokens.refused(first, 5) and credentials.token is None
    second = tokens.headers("https://kms.example/", 5)
    # From another thread, which had the former token: the token since then may be valid.
    assert tokens.refused(first, 5) and credentials.token == "2"
    clock.seconds += 29.9
    assert not tokens.refused(second, 5) and credentials.token == "2"
    clock.seconds += 0.1
    assert tokens.refused(second, 5) and credentials.token is None


# --- calls ---


class Client:
    api_endpoint = "kms.example"

    def __init__(self, *outcomes: Any, clock: TurnedClock) -> None:
        self.outcomes = list(outcomes)
        self.clock = clock
        self.asked: list[dict[str, Any]] = []
        self.closed = 0
        self.transport = SimpleNamespace(close=self._close)

    def _close(self) -> None:
        self.closed += 1

    def encrypt(self, **given: Any) -> Any:
        self.asked.append(given)
        self.clock.seconds += 2
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def test_a_call_is_sent_once_within_its_time(clock: TurnedClock) -> None:
    """Otherwise, the library's retries and timeouts would be added to ours."""
    client, credentials = Client("answer", clock=clock), Renewed()
    connection = GcpConnection(client, TokenSource(credentials, lambda **_: "one"))
    assert connection.call("encrypt", "request", 7) == "answer"
    headers = [("authorization", "Bearer one")]
    assert client.asked == [{"request": "request", "retry": None, "timeout": 7, "metadata": headers}]
    assert credentials.urls == ["https://kms.example/"]


def test_a_call_whose_token_is_refused_is_sent_again_in_what_is_left(clock: TurnedClock) -> None:
    client = Client(Unauthenticated("no"), "answer", clock=clock)
    numbers = iter("12")
    waits: list[float] = []

    class Tokens(TokenSource):
        def headers(self, url: str, seconds: float) -> list[tuple[str, str]]:
            waits.append(seconds)
            return super().headers(url, seconds)

        def refused(self, headers: Sequence[tuple[str, str]], seconds: float) -> bool:
            waits.append(seconds)
            return super().refused(headers, seconds)

    connection = GcpConnection(client, Tokens(Renewed(), lambda **_: next(numbers)))
    assert connection.call("encrypt", "request", 7) == "answer"
    sent = [(given["timeout"], dict(given["metadata"])["authorization"]) for given in client.asked]
    assert sent == [(7, "Bearer 1"), (5, "Bearer 2")] and waits == [7, 5, 5]


def test_the_libraries_are_silent_while_tokens_and_keys_pass(
    clock: TurnedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no process is forked while gRPC is at work."""
    silent: list[bool] = []

    class Gate(CallGate):
        calls = 0

        def __enter__(self) -> None:
            super().__enter__()
            self.calls += 1

        def __exit__(self, *error: object) -> None:
            self.calls -= 1
            super().__exit__(*error)

    gate = Gate()

    @contextlib.contextmanager
    def silenced() -> Iterator[None]:
        silent.append(True)
        yield
        silent.pop()

    monkeypatch.setattr(gcp_connection, "SDK_LOGS", SimpleNamespace(silenced=silenced))
    monkeypatch.setattr(gcp_connection, "GRPC_CALLS", gate)
    seen: list[tuple[str, bool, int]] = []

    def see(what: str, answer: Any) -> Any:
        seen.append((what, bool(silent), gate.calls))
        return answer

    monkeypatch.setattr(google.auth, "default", lambda **_: see("credentials", (Renewed(), None)))
    tokens = TokenSource(load_credentials(None, None, [], None), lambda **_: see("token", "one"))
    client = SimpleNamespace(encrypt=lambda **_: see("call", "answer"))
    assert GcpConnection(client, tokens).call("encrypt", "request", 7) == "answer"
    assert seen == [("credentials", True, 0), ("token", True, 0), ("call", True, 1)]
    channel = grpc.insecure_channel
    monkeypatch.setattr(grpc, "insecure_channel", lambda *given: see("channel", channel(*given)))
    open_client("127.0.0.1:1", insecure=True).transport.close()
    assert seen[3:] == [("channel", False, 1)] and not gate.calls


def test_a_call_ends_after_two_refused_tokens(clock: TurnedClock) -> None:
    client = Client(*[Unauthenticated("no")] * 3, clock=clock)
    tokens = TokenSource(Renewed(), lambda **_: "one")
    for sent in (2, 3):
        with pytest.raises(Unauthenticated):
            GcpConnection(client, tokens).call("encrypt", "request", 7)
        assert len(client.asked) == sent


@pytest.mark.parametrize("error", [Unauthenticated("no"), PermissionDenied("no")])
def test_what_no_other_token_mends_is_not_sent_again(clock: TurnedClock, error: Exception) -> None:
    tokens = None if isinstance(error, Unauthenticated) else TokenSource(Renewed(), lambda **_: "one")
    client = Client(error, "answer", clock=clock)
    with pytest.raises(type(error)):
        GcpConnection(client, tokens).call("encrypt", "request", 7)
    assert len(client.asked) == 1 and (client.asked[0]["metadata"] == ()) is (tokens is None)


# --- the channel ---


@pytest.mark.parametrize("insecure", [False, True])
def test_a_channel_has_tls_unless_it_stays_here(monkeypatch: pytest.MonkeyPatch, insecure: bool) -> None:
    """And without TLS, no proxy from the environment gets the keys."""
    made: list[tuple[str, tuple[Any, ...]]] = []
    real = {name: getattr(grpc, name) for name in ("secure_channel", "insecure_channel")}

    def recorded(name: str) -> Callable[..., Any]:
        return lambda *given: made.append((name, given)) or real[name](*given)

    for name in real:
        monkeypatch.setattr(grpc, name, recorded(name))
    client = open_client("127.0.0.1:1", insecure=insecure)
    client.transport.close()
    ((name, given),) = made
    assert given[0] == "127.0.0.1:1" and client.transport._host == "127.0.0.1:1"
    options = dict(given[-1])
    assert options["grpc.enable_retries"] == 0 and options["grpc.use_local_subchannel_pool"] == 1
    if insecure:
        assert name == "insecure_channel" and options["grpc.enable_http_proxy"] == 0
    else:
        assert name == "secure_channel" and isinstance(given[1], grpc.ChannelCredentials)
