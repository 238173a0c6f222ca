"""One request to Vault: what is sent and where to, how long it may take, and what counts as an answer."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from faults import TurnedClock
from pydantic import SecretStr

from parquet_keytools.kms.vault import connection as vault_connection
from parquet_keytools.kms.vault.connection import VaultConnection, VaultSettings, open_session
from parquet_keytools.kms.vault.errors import Reason, VaultRefusal


def settings(**fields: Any) -> VaultSettings:
    return VaultSettings.model_validate({"url": "https://vault.example:8200", "token": "t", **fields})


def test_nothing_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy gets to know who is asked, a bundle whom to trust, and a password would be sent along."""
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


class Body(io.BytesIO):
    on_read: Callable[[], None] = staticmethod(lambda: None)

    def read1(self, size: int | None = -1, **_: object) -> bytes:
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
) -> tuple[VaultConnection, Server]:
    server, clock = Server(*answers), clock or TurnedClock()
    secret = None if token is None else SecretStr(token)
    return VaultConnection(server, settings(**fields), secret, clock.seconds + seconds, clock), server


def test_what_is_sent() -> None:
    connection, server = connected(Answer(200, {"data": {}}), namespace="team")
    assert connection.get(url="/v1/x") == {"data": {}}
    ((url, arguments),) = server.asked
    assert url == "https://vault.example:8200/v1/x" and arguments["timeout"].total == 7
    assert not arguments["allow_redirects"]
    sent = {"X-Vault-Request": "true", "X-Vault-Namespace": "team", "X-Vault-Token": "t"}
    assert sent.items() <= arguments["headers"].items()
    connection, server = connected(Answer(200, {}), token=None, url="https://vault.example:8200/")
    connection.get(url="/v1/x")
    ((url, arguments),) = server.asked
    assert url == "https://vault.example:8200/v1/x"
    assert not {"X-Vault-Token", "X-Vault-Namespace"} & arguments["headers"].keys()


@pytest.mark.parametrize("seconds", [0, -1])
def test_what_is_too_late_is_not_sent(seconds: float) -> None:
    connection, server = connected(Answer(200, {}), seconds=seconds)
    with pytest.raises(TimeoutError):
        connection.get(url="/v1/x")
    assert not server.asked


def test_an_answer_that_drips_is_given_up() -> None:
    answer, clock = Answer(200, {"data": "x" * 1_000}), TurnedClock()
    connection, _ = connected(answer, clock=clock)

    def second() -> None:
        clock.seconds += 1

    answer.raw.on_read = second
    with pytest.raises(TimeoutError):
        connection.get(url="/v1/x")
    assert clock.seconds == TurnedClock().seconds + 7


def test_an_answer_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vault_connection, "_MAX_ANSWER_BYTES", 500)
    assert connected(Answer(200, {"data": "x" * 400}))[0].get(url="/v1/x")
    with pytest.raises(VaultRefusal) as caught:
        connected(Answer(200, {"data": "x" * 600}))[0].get(url="/v1/x")
    assert caught.value.reason is Reason.NOT_JSON


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Answer(204, b""), {}),
        (Answer(200, {"a": 1}), {"a": 1}),
        (Answer(400, {"data": {"batch_results": []}}), {"data": {"batch_results": []}}),
        (Answer(200, ["a"]), (200, Reason.NOT_JSON, 0)),
        (Answer(502, b"<html>", Retry_After="3"), (502, Reason.NOT_JSON, 3)),
        (Answer(200, b"[" * 100_000), (200, Reason.NOT_JSON, 0)),
        (Answer(403, {"data": {"batch_results": []}}), (403, Reason.UNKNOWN, 0)),
        (Answer(400, {"data": {"batch_results": 1}, "errors": "no"}), (400, Reason.UNKNOWN, 0)),
        (Answer(400, {"data": [], "errors": ["encryption key not found"]}), (400, Reason.NO_KEY, 0)),
        (Answer(429, {"errors": ["x"]}, Retry_After="5"), (429, Reason.UNKNOWN, 5)),
    ],
)
def test_what_is_an_answer(answer: Answer, expected: Any) -> None:
    connection, _ = connected(answer)
    if isinstance(expected, dict):
        assert connection.get(url="/v1/x") == expected
        return
    with pytest.raises(VaultRefusal) as caught:
        connection.get(url="/v1/x")
    assert (caught.value.status, caught.value.reason, caught.value.retry_after_seconds) == expected


@pytest.mark.parametrize(
    ("location", "followed"),
    [
        ("https://vault.example:8200/other", "https://vault.example:8200/v1/x"),
        ("https://node.example:8200/", "https://node.example:8200/v1/x"),
        ("https://any.example:443/", "https://any.example:443/v1/x"),
        ("https://any.example:444/", "https://any.example:444/v1/x"),
        ("https://node.example:8201/", "https://node.example:8201"),
        ("https://vault.example/", "https://vault.example:443"),
        ("http://vault.example:8200/", "http://vault.example:8200"),
        ("https://else.example:8200/", "https://else.example:8200"),
        ("ftp://vault.example:8200/", ""),
        ("https://a b:8200/", ""),
        ("https://vault.example:x/", ""),
        ("", ""),
    ],
)
def test_where_a_redirect_may_lead(location: str, followed: str) -> None:
    """To the same host, or one that is named: the token goes there, and the keys."""
    connection, server = connected(
        Answer(307, b"", Location=location),
        Answer(200, {"a": 1}),
        redirect_hosts=["Node.example:8200", "any.example"],
    )
    if followed.endswith("/v1/x"):
        assert connection.get(url="/v1/x") == {"a": 1}
        assert [url for url, _ in server.asked] == ["https://vault.example:8200/v1/x", followed]
        return
    with pytest.raises(VaultRefusal) as caught:
        connection.get(url="/v1/x")
    assert (caught.value.reason, caught.value.host) == (Reason.REDIRECT, followed) and len(server.asked) == 1


@pytest.mark.parametrize(
    ("url", "location", "is_followed"),
    [
        ("https://vault.example", "https://vault.example:443/", True),
        ("https://vault.example:443", "https://vault.example/", True),
        ("http://127.0.0.1:8200", "http://node.example:8200/", False),
        ("http://127.0.0.1:8200", "https://node.example:8200/", True),
        ("http://127.0.0.1:8200", "http://[::1]:8200/", True),
        ("http://vault.example:8200", "http://node.example:8200/", True),
        ("https://vault.example:8200", "https://[::1]:8200/", True),
        ("https://vault.example:8200", "http://[::1]:8200/", False),
    ],
)
def test_no_redirect_leads_out_of_tls_or_of_this_machine(url: str, location: str, is_followed: bool) -> None:
    """Also to hosts that are named."""
    connection, server = connected(
        Answer(307, b"", Location=location),
        Answer(200, {"a": 1}),
        url=url,
        allow_http=True,
        redirect_hosts=["node.example:8200", "[::1]:8200"],
    )
    if is_followed:
        assert connection.post(url="/v1/x", json={"b": 2}) == {"a": 1}
        assert [arguments["json"] for _, arguments in server.asked] == [{"b": 2}] * 2
        return
    with pytest.raises(VaultRefusal):
        connection.post(url="/v1/x", json={"b": 2})
    assert len(server.asked) == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_have_an_end(status: int) -> None:
    connection, server = connected(Answer(status, b"", Location="https://vault.example:8200/"))
    with pytest.raises(VaultRefusal) as caught:
        connection.get(url="/v1/x")
    assert caught.value.reason is Reason.REDIRECT and len(server.asked) == 4
