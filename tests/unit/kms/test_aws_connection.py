"""The connection to AWS KMS: whose credentials it takes, whom it trusts, what it sends, and for how long."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.config import Config
from botocore.credentials import AssumeRoleCredentialFetcher
from botocore.exceptions import ClientError, NoCredentialsError, ReadTimeoutError
from faults import TurnedClock
from pydantic import ValidationError

from parquet_keytools.errors import KmsConfigurationError
from parquet_keytools.kms.aws import connection as aws_connection
from parquet_keytools.kms.aws.connection import AwsConnection, AwsSettings

REGION = "eu-west-1"
ROLE = "arn:aws:iam::123456789012:role/team/reader"
ANSWER = {"KeyId": "k"}
KEYS = {"access_key_id": "AKIAOWN", "secret_access_key": "own-secret", "session_token": "own-token"}


@pytest.fixture(autouse=True)
def _nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("REQUESTS_CA_BUNDLE", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> TurnedClock:
    clock = TurnedClock()
    monkeypatch.setattr(aws_connection, "time", SimpleNamespace(monotonic=clock))
    return clock


@pytest.fixture
def bundles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files of certificates that were looked at; each is taken for one."""
    found: list[str] = []

    def check(file: str) -> None:
        found.append(file)

    monkeypatch.setattr(aws_connection, "check_certificates", check)
    return found


class Logs:
    """What takes the place of the logs of the SDK."""

    silent = False
    filtered = 0

    @contextlib.contextmanager
    def silenced(self) -> Iterator[None]:
        self.silent = True
        yield
        self.silent = False

    def add_filters(self) -> None:
        self.filtered += 1


class Client:
    def __init__(self, service: str = "kms", endpoint_url: str | None = None, **given: Any) -> None:
        self.given = given
        self.outcomes: list[Any] = []
        self.asked: list[dict[str, Any]] = []
        self.registered: list[tuple[str, Any]] = []
        self.closed = 0
        events = SimpleNamespace(register=lambda *of: self.registered.append(of))
        self.meta = SimpleNamespace(
            endpoint_url=endpoint_url or f"https://{service}.{REGION}.amazonaws.com",
            region_name=REGION,
            events=events,
        )

    def encrypt(self, **given: Any) -> Any:
        self.asked.append(given)
        outcome = self.outcomes.pop(0) if self.outcomes else ANSWER
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def close(self) -> None:
        self.closed += 1


class Session:
    """What takes the place of a session of the SDK, and keeps the clients that it made."""

    profile_name = "default"
    region_name = "us-east-1"

    def __init__(self) -> None:
        self.made: list[tuple[str, Client]] = []

    def client(self, service: str, **given: Any) -> Client:
        self.made.append((service, Client(service, **given)))
        return self.made[-1][1]


def connected(
    folder: Path = Path(), session: Any = None, client: Any = None, **fields: Any
) -> tuple[AwsConnection, Any]:
    session = session or (None if client else Session())
    return AwsConnection(AwsSettings.model_validate(fields), folder, session, client), session


# --- settings ---


@pytest.mark.parametrize("context", [{"a": "y" * 8_191}, {"a" * 8_192: ""}, {"aws": "x", "an aws:": ""}, {}])
def test_contexts_that_may_be(context: dict[str, str]) -> None:
    assert AwsSettings(encryption_context=context).encryption_context == context


@pytest.mark.parametrize(
    "context", [{"a": "y" * 8_192}, {"a": "y" * 8_190, "b": "", "c": "y"}, {"AWS:x": ""}, {"": "y"}]
)
def test_contexts_that_may_not_be(context: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="encryption context"):
        AwsSettings(encryption_context=context)


def test_settings_that_contradict_each_other() -> None:
    for wrong in (
        {"session_token": "t"},
        {"access_key_id": "a"},
        {"secret_access_key": "s"},
        {**KEYS, "profile": "p"},
        {"use_fips_endpoint": True, "endpoint_url": "https://kms.example"},
    ):
        with pytest.raises(ValidationError):
            AwsSettings.model_validate(wrong)
    assert AwsSettings.model_validate(KEYS) and AwsSettings(profile="p")


def test_http_of_sts_may_be_allowed() -> None:
    role = {"role_arn": ROLE, "endpoint_url": "http://sts.example.com"}
    with pytest.raises(ValidationError, match="endpoint_url is without TLS"):
        AwsSettings.model_validate({"assume_role": role})
    assert AwsSettings.model_validate({"assume_role": role, "allow_http": True}).assume_role


# --- whose credentials ---


def test_credentials_are_those_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "of the machine")
    session = aws_connection._base_session(AwsSettings.model_validate({**KEYS, "region": REGION}))
    found = session.get_credentials().get_frozen_credentials()
    assert (found.access_key, found.secret_key, found.token) == tuple(KEYS.values())
    assert session.region_name == REGION


def test_a_profile_is_that_of_the_settings(tmp_path: Path) -> None:
    text = "[profile p]\naws_access_key_id = AKIAPROFILE\naws_secret_access_key = s\nregion = eu-north-1\n"
    (tmp_path / "config").write_text(text, encoding="utf-8")
    session = aws_connection._base_session(AwsSettings(profile="p"))
    assert session.get_credentials().access_key == "AKIAPROFILE"
    assert (session.profile_name, session.region_name) == ("p", "eu-north-1")


class Sts:
    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def assume_role(self, **given: Any) -> dict[str, Any]:
        self.asked.append(given)
        keys = {"AccessKeyId": "AKIAROLE", "SecretAccessKey": "s", "SessionToken": "role-token"}
        return {"Credentials": keys | {"Expiration": "2999-01-01T00:00:00Z"}}


@pytest.mark.parametrize("external_id", [None, "CANARY"])
def test_a_role_is_assumed_with_our_credentials_and_limits(
    tmp_path: Path, bundles: list[str], monkeypatch: pytest.MonkeyPatch, external_id: str | None
) -> None:
    role = {"role_arn": ROLE, "session_name": "me", "duration_seconds": 900, "endpoint_url": "https://sts.example"}
    given = {**KEYS, "region": REGION, "assume_role": role | {"external_id": external_id}, "ca_bundle": "ca.pem"}
    connection, _ = connected(tmp_path, session=None, **given)
    sts = Sts()
    made: list[tuple[Any, ...]] = []

    def opened(make: Any, service: str, endpoint_url: str | None, **credentials: str) -> Any:
        made.append((service, endpoint_url, credentials))
        return sts

    monkeypatch.setattr(connection, "_opened", opened)
    checked: list[Any] = []
    monkeypatch.setattr(connection, "_checked", lambda client: checked.append(client) or client)
    session = connection._session_in_role(aws_connection._base_session(connection._settings))
    assert session.region_name == REGION and not made
    found = session.get_credentials().get_frozen_credentials()
    assert (found.access_key, found.secret_key, found.token) == ("AKIAROLE", "s", "role-token")
    ours = {f"aws_{name}": value for name, value in KEYS.items()}
    assert made == [("sts", "https://sts.example", ours)] and checked == [sts]
    expected = {"RoleArn": ROLE, "RoleSessionName": "me", "DurationSeconds": 900}
    assert sts.asked == [expected | ({"ExternalId": external_id} if external_id else {})]


def test_no_role_is_assumed_without_credentials() -> None:
    base = SimpleNamespace(get_credentials=lambda: None)
    connection, _ = connected(session=base, assume_role={"role_arn": ROLE})
    with pytest.raises(NoCredentialsError):
        connection._make_client()


def test_a_session_in_a_role_keeps_the_region_and_the_profile(tmp_path: Path) -> None:
    """Else the certificates that were looked at are not those that STS and the KMS are checked with."""
    (tmp_path / "config").write_text("[profile p]\nregion = eu-north-1\n[default]\nregion = eu-west-3\n")
    role = {"role_arn": ROLE}
    for of_caller, fields, profile, region in (
        ("p", {}, "p", "eu-north-1"),
        ("default", {}, "default", "eu-north-1"),
        ("default", {"profile": "p", "region": REGION}, "p", REGION),
    ):
        base = SimpleNamespace(get_credentials=object, profile_name=of_caller, region_name="eu-north-1")
        session = connected(session=base, assume_role=role, **fields)[0]._session_in_role(base)
        assert (session.profile_name, session.region_name) == (profile, region)
    connection = AwsConnection(AwsSettings.model_validate({"profile": "p", "assume_role": role}), tmp_path)
    assert connection._session_in_role(base).profile_name == "p"


def test_a_role_is_not_asked_for_when_time_is_up(clock: TurnedClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AssumeRoleCredentialFetcher, "fetch_credentials", lambda _: {"access_key": "role"})
    found = SimpleNamespace(get_credentials=object, profile_name="default", region_name=REGION)
    connection, _ = connected(session=found, assume_role={"role_arn": ROLE})
    credentials = connection._session_in_role(found).get_credentials()
    assert credentials._refresh_using() == {"access_key": "role"}
    for seconds in (0.1, 0, -1):
        token = aws_connection._deadline_of_call.set(clock.seconds + seconds)
        if seconds > 0:
            assert credentials._refresh_using() == {"access_key": "role"}
        else:
            with pytest.raises(ReadTimeoutError):
                credentials._refresh_using()
        aws_connection._deadline_of_call.reset(token)


@pytest.mark.parametrize("in_role", [False, True])
def test_a_client_acts_in_the_role_if_there_is_one(monkeypatch: pytest.MonkeyPatch, in_role: bool) -> None:
    role = {"assume_role": {"role_arn": ROLE}} if in_role else {}
    connection, session = connected(region=REGION, **role)
    other = Session()

    def assumed(base: Any) -> Any:
        assert base is session
        return other

    monkeypatch.setattr(connection, "_session_in_role", assumed)
    client = connection._make_client()
    assert (other if in_role else session).made == [("kms", client)]
    assert not (session if in_role else other).made


# --- whom it trusts, and its limits ---


def test_a_client_has_our_limits(tmp_path: Path, bundles: list[str]) -> None:
    """The SDK's own retries would multiply with ours."""
    fields = {"call_timeout_seconds": 10, "max_concurrent_calls": 7, "ca_bundle": "ca.pem", "region": REGION}
    connection, session = connected(tmp_path, **fields, endpoint_url="https://kms.example")
    client = connection._make_client()
    assert session.made == [("kms", client)] and bundles == [str(tmp_path / "ca.pem")]
    given = dict(client.given)
    config = given.pop("config")
    assert given == {"region_name": REGION, "verify": str(tmp_path / "ca.pem")}
    assert client.meta.endpoint_url == "https://kms.example"
    assert (config.connect_timeout, config.read_timeout, config.max_pool_connections) == (4, 6, 7)
    assert config.retries == {"total_max_attempts": 1, "mode": "standard"} and config.tcp_keepalive
    assert config.use_fips_endpoint is None and config.ignore_configured_endpoint_urls is None
    assert config.user_agent.startswith("parquet-keytools ") and config.proxies is None
    assert client.registered == [("before-call.kms", aws_connection._set_read_timeout)]


def test_fips_endpoints_are_those_of_aws() -> None:
    client = connected(region=REGION, use_fips_endpoint=True)[0]._make_client()
    config = client.given["config"]
    assert config.use_fips_endpoint and config.ignore_configured_endpoint_urls
    assert client.given["verify"] is None


@pytest.mark.parametrize("allowed", [False, True])
def test_without_tls_no_proxy_of_the_environment_is_asked(allowed: bool) -> None:
    connection, session = connected(region=REGION, endpoint_url="http://127.0.0.1:8080", allow_http=allowed)
    client = connection._make_client()
    made = [client for _, client in session.made]
    assert made[-1] is client and len(client.registered) == 1 and not client.closed
    config: Config = client.given["config"]
    assert config.retries == {"total_max_attempts": 1, "mode": "standard"}
    if allowed:
        assert len(made) == 1 and config.proxies is None
    else:
        assert len(made) == 2 and config.proxies == {} and made[0].closed == 1
        assert client.meta.endpoint_url == "http://127.0.0.1:8080"


@pytest.mark.parametrize("place", ["AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "profile", "profile of a session"])
@pytest.mark.parametrize("content", ["", "of-others.pem"])
def test_certificates_of_the_environment_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bundles: list[str], place: str, content: str
) -> None:
    """An empty name would switch verification off in some versions of the SDK."""
    session, fields = Session(), {"region": REGION}
    if place.startswith("profile"):
        (tmp_path / "config").write_text(f"[profile p]\nca_bundle = {content}\n", encoding="utf-8")
        if place == "profile":
            fields["profile"] = "p"
        else:
            session.profile_name = "p"
    else:
        monkeypatch.setenv(place, content)
    connection, _ = connected(session=session, **fields)
    if content:
        assert connection._make_client() and bundles == [content]
        return
    with pytest.raises(KmsConfigurationError, match="is empty") as caught:
        connection._make_client()
    assert "file of certificates" in caught.value.hint and not session.made


@pytest.mark.parametrize(
    ("fields", "ignored", "told"),
    [
        ({}, None, True),
        ({}, "true", False),
        ({"endpoint_url": "https://kms.example"}, None, False),
        ({"use_fips_endpoint": True}, None, False),
    ],
)
def test_an_endpoint_of_a_profile_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fields: dict[str, Any], ignored: str | None, told: bool
) -> None:
    text = f"[profile p]\nendpoint_url = https://kms.other.example\nignore_configured_endpoint_urls = {ignored}\n"
    (tmp_path / "config").write_text(text, encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        connected(region=REGION, profile="p", **fields)[0]._make_client()
    assert ("set the endpoint of kms" in caplog.text) is told
    caplog.clear()
    connected(region=REGION)[0]._make_client()
    assert not caplog.text


@pytest.mark.parametrize("in_client", [False, True])
def test_no_endpoint_takes_the_keys_without_tls(in_client: bool) -> None:
    """Nor one that a profile names, nor that of a client of the caller."""
    client = Client(endpoint_url="http://kms.other.example")
    session = SimpleNamespace(client=lambda *_, **__: client, profile_name="default")
    given: dict[str, Any] = {"client": client} if in_client else {"session": session}
    with pytest.raises(KmsConfigurationError, match="endpoint_url is without TLS") as caught:
        connected(region=REGION, **given)[0].call("encrypt", 5)
    assert "allow_http" in caught.value.hint and not client.asked
    assert connected(region=REGION, allow_http=True, **given)[0].call("encrypt", 5) == ANSWER


# --- calls ---


def test_the_sdk_is_silent_while_keys_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    logs, client = Logs(), Client()
    monkeypatch.setattr(aws_connection, "_sdk_logs", logs)
    seen: list[tuple[bool, int]] = []
    monkeypatch.setattr(client, "encrypt", lambda **_: seen.append((logs.silent, logs.filtered)))
    connected(client=client)[0].call("encrypt", 5)
    assert seen == [(True, 1)] and not logs.silent


def test_without_a_session_one_is_made_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session()
    monkeypatch.setattr(aws_connection, "_base_session", lambda settings: session)
    client = AwsConnection(AwsSettings(region=REGION), Path())._make_client()
    assert session.made == [("kms", client)]


def test_a_call_has_its_deadline_and_the_region_of_the_client(clock: TurnedClock) -> None:
    client = Client()
    connection, _ = connected(client=client)
    deadlines: list[float | None] = []

    def key(region: str) -> str:
        deadlines.append(aws_connection._deadline_of_call.get())
        return f"key in {region}"

    assert connection.call("encrypt", 5, KeyId=key, Plaintext=b"k") == ANSWER
    assert client.asked == [{"KeyId": f"key in {REGION}", "Plaintext": b"k"}]
    assert deadlines == [clock.seconds + 5] and aws_connection._deadline_of_call.get() is None


@pytest.mark.parametrize(("seconds", "timeout"), [(10, 6), (5, 3), (0, 0.001), (-5, 0.001)])
def test_an_answer_is_waited_for_in_the_time_that_is_left(
    clock: TurnedClock, seconds: float, timeout: float
) -> None:
    context: dict[str, Any] = {"read_timeout": 60}
    aws_connection._set_read_timeout(context=context, more="")
    assert context == {"read_timeout": 60} and aws_connection._seconds_left() == float("inf")
    token = aws_connection._deadline_of_call.set(clock.seconds + seconds)
    aws_connection._set_read_timeout(context=context, more="")
    aws_connection._deadline_of_call.reset(token)
    assert context["read_timeout"] == pytest.approx(timeout)


def expired(code: str = "ExpiredTokenException") -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": "no"}}, "Encrypt")


def connected_to(monkeypatch: pytest.MonkeyPatch, *clients: Client) -> AwsConnection:
    left = iter(clients)
    session = SimpleNamespace(client=lambda *_, **__: next(left), profile_name="default")
    return connected(session=session, region=REGION)[0]


def test_expired_credentials_are_read_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = Client(), Client(), Client()
    connection = connected_to(monkeypatch, first, second, third)
    first.outcomes, second.outcomes = [expired()], [{"a": 1}, expired()]
    third.outcomes = [expired()]
    assert connection.call("encrypt", 5) == {"a": 1}
    with pytest.raises(ClientError):
        connection.call("encrypt", 5)
    assert [len(client.asked) for client in (first, second, third)] == [1, 2, 1]


def test_a_client_that_another_thread_made_meanwhile_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Client(), Client()
    connection = connected_to(monkeypatch, first, second)

    def encrypt(**_: Any) -> Any:
        connection._clients.take()
        assert connection._clients.get() is second
        raise expired()

    monkeypatch.setattr(first, "encrypt", encrypt)
    assert connection.call("encrypt", 5) == ANSWER and connection._clients.get() is second


@pytest.mark.parametrize(("code", "given"), [("AccessDeniedException", False), ("ExpiredTokenException", True)])
def test_other_refusals_are_not_sent_again(monkeypatch: pytest.MonkeyPatch, code: str, given: bool) -> None:
    """And the credentials of a client of the caller are the caller's business."""
    client = Client()
    client.outcomes = [expired(code)]
    connection = connected(client=client)[0] if given else connected_to(monkeypatch, client)
    with pytest.raises(ClientError):
        connection.call("encrypt", 5)
    assert len(client.asked) == 1 and connection._clients.get() is client


def test_clients_of_ours_are_closed_and_no_others() -> None:
    connection, session = connected(region=REGION)
    connection.close()
    assert not session.made
    connection.call("encrypt", 5)
    connection.close()
    assert session.made[0][1].closed == 1
    client = Client()
    given = connected(client=client)[0]
    given.call("encrypt", 5)
    given.close()
    assert not client.closed


def test_a_forked_child_drops_the_connections_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()
    connection, _ = connected(client=client)
    assert connection._make_client() is client and not client.closed
    monkeypatch.setattr(connection, "_owner", SimpleNamespace(is_here=False))
    assert connection._make_client() is client and client.closed == 1


@pytest.mark.parametrize(
    ("fields", "given", "region", "address"),
    [
        ({}, {}, None, ""),
        ({"region": REGION}, {}, REGION, f"region {REGION}"),
        ({}, {"session": Session()}, "us-east-1", "region us-east-1"),
        ({"region": REGION}, {"session": Session()}, REGION, f"region {REGION}"),
        ({}, {"client": Client()}, REGION, f"region {REGION}"),
        ({"endpoint_url": "https://kms.example"}, {}, None, "https://kms.example"),
        ({"endpoint_url": "https://a.b", "region": REGION}, {}, REGION, f"https://a.b, region {REGION}"),
        ({}, {"session": SimpleNamespace(region_name=None)}, None, ""),
    ],
)
def test_where_the_kms_is(fields: Any, given: dict[str, Any], region: str | None, address: str) -> None:
    connection = AwsConnection(AwsSettings(**fields), Path(), **given)
    assert (connection.region, connection.address) == (region, address)
