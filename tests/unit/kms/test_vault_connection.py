"""One request to Vault: its content and address, its time limit, and which answers are valid."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests
from faults import TurnedClock
from pydantic import SecretStr, ValidationError
from urllib3.exceptions import ProtocolError, ReadTimeoutError

from parquet_keytools.errors import KmsConfigurationError, KmsResponseInvalidError
from parquet_keytools.kms import http_session
from parquet_keytools.kms import vault as vault_connection
from parquet_keytools.kms.transport import Meaning
from parquet_keytools.kms.vault import (
    NO_KEY,
    NOT_JSON,
    TOKEN_DEAD,
    TOKEN_UNKNOWN,
    VaultKms,
    VaultRefusal,
    VaultServer,
    VaultSettings,
    open_session,
)


def settings(**fields: Any) -> VaultSettings:
    return VaultSettings.model_validate({"url": "https://vault.example:8200", "token": "t", **fields})


def test_nothing_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would learn the host, a bundle changes trust, and a password would be sent along."""
    netrc = tmp_path / "netrc"
    netrc.write_text("default login me password CANARY\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://proxy.example:3128")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(netrc))
    for given, proxies in (({}, {}), ({"proxy": "http://own.example:1"}, "http://own.example:1")):
        session = open_session(settings(**given), tmp_path)
        used = session.merge_environment_settings("https://vault.example:8200/v1", {}, None, None, None)
        assert used["verify"] is True and used["cert"] is None
        assert used["proxies"] == (proxies and {"http": proxies, "https": proxies})
        sent = session.prepare_request(requests.Request("GET", "https://vault.example:8200/v1"))
        assert "Authorization" not in sent.headers


@pytest.mark.parametrize(
    "given", [{"url": "https://vault..example:8200"}, {"proxy": "http://proxy..example:1"}], ids=str
)
def test_a_host_that_cannot_exist_is_not_waited_for(given: dict[str, str]) -> None:
    with contextlib.closing(VaultKms(settings(**given))) as kms, pytest.raises(KmsResponseInvalidError):
        kms.describe("one")


class Body(io.BytesIO):
    on_read: Callable[[], None] = staticmethod(lambda: None)

    def read1(self, size: int | None = -1, *, decode_content: bool = False) -> bytes:
        assert decode_content
        self.on_read()
        return super().read1(min(size or 0, 50))


class Answer:
    def __init__(self, status: int, content: object, **headers: str) -> None:
        self.status_code = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        self.raw = Body(content if isinstance(content, bytes) else json.dumps(content).encode())

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None: ...


class Server(requests.Session):
    def __init__(self, *answers: Answer) -> None:
        super().__init__()
        self.answers = list(answers)
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def request(self, method: Any, url: Any, **arguments: Any) -> Any:  # type: ignore[override]
        self.asked.append((url, arguments))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def connected(
    *answers: Answer, token: str | None = "t", clock: TurnedClock | None = None, seconds: float = 7, **fields: Any
) -> tuple[Callable[[], Any], Server]:
    server, clock = Server(*answers), clock or TurnedClock()
    secret = None if token is None else SecretStr(token)
    vault = VaultServer(server, settings(**fields), clock)
    return partial(vault.request, "GET", "/v1/x", secret, clock.seconds + seconds), server


def test_what_is_sent() -> None:
    connection, server = connected(Answer(200, {"data": {}}), namespace="team")
    assert connection() == {"data": {}}
    ((url, arguments),) = server.asked
    assert url == "https://vault.example:8200/v1/x" and arguments["timeout"].total == 7
    assert not arguments["allow_redirects"] and arguments["stream"]
    sent = {"X-Vault-Request": "true", "X-Vault-Namespace": "team", "X-Vault-Token": "t"}
    assert sent.items() <= arguments["headers"].items()
    connection, server = connected(Answer(200, {}), token=None, url="https://vault.example:8200/")
    connection()
    ((url, arguments),) = server.asked
    assert url == "https://vault.example:8200/v1/x"
    assert not {"X-Vault-Token", "X-Vault-Namespace"} & arguments["headers"].keys()


@pytest.mark.parametrize("seconds", [0, -1])
def test_what_is_too_late_is_not_sent(seconds: float) -> None:
    connection, server = connected(Answer(200, {}), seconds=seconds)
    with pytest.raises(TimeoutError):
        connection()
    assert not server.asked


def test_an_answer_that_drips_is_given_up() -> None:
    answer, clock = Answer(200, {"data": "x" * 1_000}), TurnedClock()
    connection, _ = connected(answer, clock=clock)

    def second() -> None:
        clock.seconds += 1

    answer.raw.on_read = second
    with pytest.raises(TimeoutError):
        connection()
    assert clock.seconds == TurnedClock().seconds + 7


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ReadTimeoutError(None, None, "CANARY"), TimeoutError),  # type: ignore[arg-type]
        (ProtocolError("CANARY"), requests.ConnectionError),
    ],
)
def test_an_answer_that_breaks_off_is_a_failed_connection(error: Exception, kind: type[Exception]) -> None:
    """And no part of it gets into an exception."""
    answer = Answer(200, {"data": {}})

    def fail() -> None:
        raise error

    answer.raw.on_read = fail
    with pytest.raises(kind) as caught:
        connected(answer, seconds=0.5)[0]()
    assert "CANARY" not in str(caught.value)


def test_an_answer_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_session, "MAX_ANSWER_BYTES", 500)
    assert connected(Answer(200, {"data": "x" * 400}))[0]()
    with pytest.raises(KmsResponseInvalidError):
        connected(Answer(200, {"data": "x" * 600}))[0]()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Answer(204, b""), {}),
        (Answer(200, {"a": 1}), {"a": 1}),
        (Answer(400, {"data": {"batch_results": []}}), {"data": {"batch_results": []}}),
        (Answer(200, ["a"]), (200, NOT_JSON, 0)),
        (Answer(502, b"<html>", Retry_After="3"), (502, NOT_JSON, 3)),
        (Answer(200, b"[" * 100_000), (200, NOT_JSON, 0)),
        (Answer(403, {"data": {"batch_results": []}}), (403, None, 0)),
        (Answer(400, {"data": {"batch_results": 1}, "errors": "no"}), (400, None, 0)),
        (Answer(400, {"data": [], "errors": ["encryption key not found"]}), (400, NO_KEY, 0)),
        (Answer(429, {"errors": ["x"]}, Retry_After="5"), (429, None, 5)),
    ],
)
def test_what_is_an_answer(answer: Answer, expected: Any) -> None:
    connection, _ = connected(answer)
    if isinstance(expected, dict):
        assert connection() == expected
        return
    with pytest.raises(VaultRefusal) as caught:
        connection()
    assert (caught.value.status, caught.value.known, caught.value.retry_after_seconds) == expected


# --- settings ---


@pytest.mark.parametrize("mount", ["transit", "team/transit", "a.b-c_d/1", "a"])
def test_mounts_that_may_be(mount: str) -> None:
    way = {"role": "r", "jwt_file": "f", "mount": mount}
    made = VaultSettings.model_validate({"url": "https://vault.example", "mount_point": mount, "jwt": way})
    assert made.mount_point == mount and made.jwt is not None and made.jwt.mount == mount


@pytest.mark.parametrize(
    "mount", ["", "/a", "a/", "a//b", "..", "a/../sys", "a..b", "a b", "a?b", "a#b", "a%2fb", "a\n"]
)
def test_no_mount_leads_elsewhere(mount: str) -> None:
    """It becomes part of a path, and the request would be a different one."""
    ways: list[dict[str, Any]] = [
        {"mount_point": mount, "token": "t"},
        {"approle": {"role_id": "r", "mount": mount}},
        {"kubernetes": {"role": "r", "mount": mount}},
        {"jwt": {"role": "r", "jwt": "j", "mount": mount}},
    ]
    for way in ways:
        with pytest.raises(ValidationError, match="a mount point is a path"):
            VaultSettings.model_validate({"url": "https://vault.example", **way})


def test_namespaces_are_paths() -> None:
    for namespace in ("team", "org/team", "org/team/", "my team", "a.b-c_d"):
        assert settings(namespace=namespace).namespace == namespace
    for namespace in ("", "/a", "a//b", "..", "a/../b", "a..b", "a\nb", "a\r\nX-Vault-Token: x"):
        with pytest.raises(ValidationError, match="a namespace is a path"):
            settings(namespace=namespace)


WAYS: dict[str, Any] = {
    "token": "t",
    "token_file": "f",
    "approle": {"role_id": "r"},
    "kubernetes": {"role": "r"},
    "jwt": {"role": "r", "jwt": "j"},
}


def test_there_is_one_way_to_log_in() -> None:
    for name, way in WAYS.items():
        assert VaultSettings.model_validate({"url": "https://vault.example", name: way})
        for other in WAYS.keys() - {name}:
            with pytest.raises(
                ValidationError, match="give one of token, token_file, approle, kubernetes and jwt"
            ):
                VaultSettings.model_validate({"url": "https://vault.example", name: way, other: WAYS[other]})
    with pytest.raises(ValidationError, match="give one of"):
        VaultSettings.model_validate({"url": "https://vault.example"})


@pytest.mark.parametrize("kind", ["approle", "jwt"])
def test_a_secret_of_a_login_is_given_in_one_way(kind: str) -> None:
    secret = "secret_id" if kind == "approle" else "jwt"
    base = {"role_id": "r"} if kind == "approle" else {"role": "r"}

    def made(**fields: str) -> VaultSettings:
        return VaultSettings.model_validate({"url": "https://vault.example", kind: base | fields})

    assert made(**{secret: "CANARY"}) and made(**{f"{secret}_file": "f"})
    with pytest.raises(ValidationError, match=f"give either {secret}") as caught:
        made(**{secret: "CANARY", f"{secret}_file": "f"})
    assert "CANARY" not in str(caught.value)
    if kind == "approle":
        # A role may need no secret id.
        assert made()
    else:
        with pytest.raises(ValidationError, match="give either jwt"):
            made()


def test_logins_are_where_vault_has_them() -> None:
    base = {"url": "https://vault.example"}
    logins = [
        VaultSettings.model_validate({**base, name: WAYS[name]}) for name in ("approle", "kubernetes", "jwt")
    ]
    mounts = [(one.approle or one.kubernetes or one.jwt).mount for one in logins]  # type: ignore[union-attr]
    assert mounts == ["approle", "kubernetes", "jwt"] and logins[0].mount_point == "transit"
    pod = logins[1].kubernetes
    assert pod and str(pod.jwt_path) == "/var/run/secrets/kubernetes.io/serviceaccount/token"
    for name, role in (("approle", "role_id"), ("kubernetes", "role"), ("jwt", "role")):
        with pytest.raises(ValidationError):
            VaultSettings.model_validate({**base, name: {**WAYS[name], role: ""}})


def test_batches_have_a_size() -> None:
    assert settings().batch_size == 100
    for size in (1, 1000):
        assert settings(batch_size=size).batch_size == size
    for size in (0, 1001):
        with pytest.raises(ValidationError):
            settings(batch_size=size)


def test_a_context_is_text_or_a_mapping_or_none() -> None:
    assert settings().context_bytes() is None
    assert settings(context="").context_bytes() == b""
    assert settings(context={"b": "1", "a": "2"}).context_bytes() == b'{"a":"2","b":"1"}'


@pytest.mark.parametrize(
    ("url", "allow_http", "proxy", "mistake"),
    [
        ("https://vault.example", False, "http://proxy.example:3128", ""),
        ("http://127.0.0.1", False, "http://127.0.0.1:3128", ""),
        ("http://127.0.0.1", False, "http://proxy.example:3128", "the proxy can read the keys"),
        ("http://127.0.0.1", True, "http://proxy.example:3128", ""),
        ("http://vault.example", True, "http://proxy.example:3128", ""),
        ("http://vault.example", False, None, "url is without TLS"),
        ("https://vault.example", False, "proxy.example", "proxy must be an address"),
    ],
)
def test_who_may_read_the_keys_on_their_way(url: str, allow_http: bool, proxy: str | None, mistake: str) -> None:
    fields = {"url": url, "allow_http": allow_http, "proxy": proxy}
    if not mistake:
        assert settings(**fields).url == url
        return
    with pytest.raises(ValidationError, match=mistake):
        settings(**fields)


# --- TLS ---


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Records which certificate files were checked; each counts as a file."""
    found: list[Any] = []

    def check(*files: str | None) -> None:
        found.append(files)

    for name in ("check_certificates", "check_client_certificate"):
        monkeypatch.setattr(vault_connection, name, check)
    return found


def test_certificates_are_those_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looked_at: list[Any]
) -> None:
    names = ("ca.pem", "client.pem", "key.pem")
    ca, client, key = (str(tmp_path / name) for name in names)
    for name in names:
        (tmp_path / name).touch()
    session = open_session(settings(), tmp_path)
    assert session.verify is True and session.cert is None and not looked_at
    session = open_session(settings(ca_file="ca.pem"), tmp_path)
    assert session.verify == ca and session.cert is None and looked_at == [(ca,)]
    session = open_session(settings(client_cert="client.pem"), tmp_path)
    assert session.verify is True and session.cert == client and looked_at[1:] == [(client, None)]
    session = open_session(settings(client_cert="client.pem", client_key="key.pem"), tmp_path)
    assert session.cert == (client, key) and looked_at[2:] == [(client, key)]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_session(settings(ca_file="~/ca.pem"), Path("/other")).verify == ca
    with pytest.raises(ValidationError, match="client_key needs client_cert"):
        settings(client_key="key.pem")


@pytest.mark.parametrize("setting", ["ca_file", "client_cert", "client_key"])
def test_a_file_of_certificates_that_is_not_there_is_no_reason_to_trust_others(
    tmp_path: Path, setting: str
) -> None:
    (tmp_path / "client.pem").touch()
    fields = {"client_cert": "client.pem", setting: "missing.pem"}
    with pytest.raises(KmsConfigurationError, match="there is no file") as caught:
        open_session(settings(**fields), tmp_path)
    assert str(tmp_path / "missing.pem") in str(caught.value)


@pytest.mark.parametrize("scheme", ["https", "http"])
def test_nothing_is_sent_again_below_us(tmp_path: Path, scheme: str) -> None:
    """Two retry policies on top of each other multiply."""
    session = open_session(settings(max_concurrent_calls=7), tmp_path)
    adapter: Any = session.get_adapter(f"{scheme}://vault.example")
    assert adapter.max_retries.total == 0 and adapter._pool_maxsize == 7 and not adapter._pool_block


# --- refused tokens ---


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer(200, {"data": {}}), None),
        (Answer(403, {"errors": ["permission denied"]}), TOKEN_DEAD),
        (Answer(500, {"errors": []}), TOKEN_UNKNOWN),
        (Answer(404, {"errors": []}), TOKEN_UNKNOWN),
    ],
)
def test_whether_a_token_is_dead(answer: Answer, reason: Meaning | None) -> None:
    """A valid token may list the mounts that it sees."""
    clock, server = TurnedClock(), Server(answer)
    vault = VaultServer(server, settings(), clock)
    assert vault.meaning_of_refusals(SecretStr("t"), clock.seconds + 7) is reason
    assert [url for url, _ in server.asked] == ["https://vault.example:8200/v1/sys/internal/ui/mounts"]
