"""The token of a process: when it is obtained, renewed, replaced and revoked, by a clock that tests advance."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from faults import TurnedClock

from parquet_keytools.errors import KmsConfigurationError
from parquet_keytools.kms.vault import (
    NOT_JSON,
    TOKEN_DEAD,
    TOKEN_UNKNOWN,
    VaultRefusal,
    VaultServer,
    VaultSession,
    VaultSettings,
    read_secret,
    token_source,
)

FOREVER = 1e9
LOGIN, LOOKUP = "/v1/auth/approle/login", "/v1/auth/token/lookup-self"
RENEW, REVOKE = "/v1/auth/token/renew-self", "/v1/auth/token/revoke-self"


class Body(io.BytesIO):
    """As urllib3 raises it."""

    def read1(self, size: int | None = -1, **_: object) -> bytes:
        return super().read1(size)


class Answer:
    """What `requests` returns, as far as it is used."""

    def __init__(self, status: int, content: object) -> None:
        self.status_code = status
        self.headers: dict[str, str] = {}
        self.raw = Body(json.dumps(content).encode())

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None: ...


class Server(requests.Session):
    """Numbers the tokens of its logins, and answers as a test chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, str | None]] = []
        self.logins = 0
        self.lifetime: object = 90
        self.renewable: object = True
        self.refusals: dict[str, int] = {}
        self.renewed_for: object = 90
        self.known: dict[str, Any] = {"display_name": "approle", "meta": {"role_name": "r"}}
        self.token: object = "t{}"
        self.sent: list[tuple[str, object]] = []

    def request(self, method: Any, url: Any, **arguments: Any) -> Any:  # type: ignore[override]
        path = url.removeprefix("http://127.0.0.1:8200")
        self.asked.append((path.rpartition("/")[2], arguments["headers"].get("X-Vault-Token")))
        if path in self.refusals:
            return Answer(self.refusals[path], {"errors": ["no"]})
        if path.endswith("/login"):
            self.logins += 1
            self.sent.append((path, arguments["json"]))
            token = self.token.format(self.logins) if isinstance(self.token, str) else self.token
            auth = {"lease_duration": self.lifetime, "renewable": self.renewable, "client_token": token}
            return Answer(200, {"auth": auth if token is not None else None})
        if path == RENEW:
            return Answer(200, {"auth": {"lease_duration": self.renewed_for, "renewable": self.renewable}})
        return Answer(200, {"data": {**self.known, "ttl": self.lifetime, "renewable": self.renewable}})

    def taken(self) -> list[tuple[str, str | None]]:
        asked, self.asked = self.asked, []
        return asked


Made = tuple[VaultSession, Server, TurnedClock]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Made]:
    def made(**how: Any) -> Made:
        given = how or {"approle": {"role_id": "id", "secret_id": "secret"}}
        settings = VaultSettings.model_validate({"url": "http://127.0.0.1:8200", **given})
        server, clock = Server(), TurnedClock()
        source = token_source(settings, tmp_path)
        return VaultSession(source, VaultServer(server, settings, clock), clock), server, clock

    return made


def test_no_repr_shows_the_token(make: Callable[..., Made]) -> None:
    session, server, _ = make()
    server.token = "CANARY-{}"
    held = session.token(FOREVER)
    assert held.value.get_secret_value() == "CANARY-1"
    assert "CANARY" not in repr(held) + repr(session) + repr(vars(session))


def test_a_login_is_renewed_after_two_thirds_of_its_life(make: Callable[..., Made]) -> None:
    session, server, clock = make()
    assert session.principal == "approle"
    held = session.token(FOREVER)
    assert (held.value.get_secret_value(), held.principal) == ("t1", "approle role r")
    assert server.taken() == [("login", None), ("lookup-self", "t1")]
    clock.seconds += 59
    assert session.token(FOREVER) is held and not server.taken()
    clock.seconds += 1
    renewed = session.token(FOREVER)
    assert renewed.value == held.value and server.taken() == [("renew-self", "t1")]
    assert (renewed.ends_at, renewed.due_at) == (clock.seconds + 90, clock.seconds + 60)
    assert session.token(FOREVER) is renewed and not server.taken()
    # Too late, as after a night's sleep.
    clock.seconds += 90
    assert session.token(FOREVER).value.get_secret_value() == "t2"
    assert [what for what, _ in server.taken()] == ["login", "lookup-self"]


@pytest.mark.parametrize(
    ("change", "renewals"),
    [
        ({"renewed_for": 45}, 1),
        ({"renewed_for": 0}, 1),
        ({"renewed_for": "90"}, 1),
        ({"refusals": {RENEW: 403}}, 1),
        ({"renewable": False}, 0),
    ],
)
def test_what_is_not_renewed_is_replaced_by_another_login(
    make: Callable[..., Made], change: dict[str, Any], renewals: int
) -> None:
    """Near its maximum life, a token is renewed for the time that is left."""
    session, server, clock = make()
    vars(server).update(change)
    session.token(FOREVER)
    server.taken()
    clock.seconds += 60
    assert session.token(FOREVER).value.get_secret_value() == "t2"
    assert [what for what, _ in server.taken()] == ["renew-self"] * renewals + ["login", "lookup-self"]


@pytest.mark.parametrize("refusals", [{RENEW: 503}, {RENEW: 403, LOGIN: 403}])
def test_a_token_serves_until_its_end_where_neither_goes(
    make: Callable[..., Made], refusals: dict[str, int]
) -> None:
    session, server, clock = make()
    first = session.token(FOREVER)
    server.refusals = refusals
    clock.seconds += 60
    held = session.token(FOREVER)
    assert (held.value, held.ends_at, held.due_at) == (first.value, first.ends_at, clock.seconds + 4.5)
    server.taken()
    clock.seconds += 4.4
    assert session.token(FOREVER) is held and not server.taken()
    clock.seconds += 0.2
    assert session.token(FOREVER).value == first.value and server.taken()
    clock.seconds += 30
    server.refusals = {LOGIN: 403}
    with pytest.raises(VaultRefusal) as caught:
        session.token(FOREVER)
    assert (caught.value.login, caught.value.status) == ("approle", 403)


@pytest.mark.parametrize("lifetime", [0, -1, True, "90", None])
def test_a_token_without_an_end_is_never_due(make: Callable[..., Made], lifetime: object) -> None:
    session, server, clock = make()
    server.lifetime = lifetime
    held = session.token(FOREVER)
    server.taken()
    clock.seconds += 1e6
    assert session.token(FOREVER) is held and not server.taken()


@pytest.mark.parametrize("token", ["t\r\nX-Vault-Namespace: other", "tök", "\x7f", "", 7, None])
def test_a_token_that_is_none_is_refused(make: Callable[..., Made], token: object) -> None:
    """It becomes a header."""
    session, server, _ = make()
    server.token = token
    with pytest.raises(VaultRefusal) as caught:
        session.token(FOREVER)
    assert caught.value.known is NOT_JSON and len(server.taken()) == 1


def test_who_it_is_stands_in_one_line(make: Callable[..., Made]) -> None:
    session, server, _ = make()
    server.known = {"display_name": "a\nb\x1b[0m", "meta": {"role_name": "x" * 300}}
    principal = session.token(FOREVER).principal
    assert principal.startswith("a?b?[0m role x") and len(principal) == 200
    session, server, _ = make()
    server.known = {"display_name": 7, "meta": ["r"]}
    assert session.token(FOREVER).principal == "approle"


@pytest.mark.parametrize(
    ("settings", "path", "sent"),
    [
        ({"approle": {"role_id": "id"}}, "approle", {"role_id": "id", "secret_id": None}),
        ({"approle": {"role_id": "id", "secret_id": "word", "mount": "a/b"}}, "a/b",
         {"role_id": "id", "secret_id": "word"}),
        ({"approle": {"role_id": "id", "secret_id_file": "secret"}}, "approle",
         {"role_id": "id", "secret_id": "of-the-file"}),
        ({"kubernetes": {"role": "r", "jwt_path": "secret", "mount": "k"}}, "k",
         {"role": "r", "jwt": "of-the-file"}),
        ({"jwt": {"role": "r", "jwt": "word", "mount": "j"}}, "j", {"role": "r", "jwt": "word"}),
        ({"jwt": {"role": "r", "jwt_file": "secret"}}, "jwt", {"role": "r", "jwt": "of-the-file"}),
    ],
)  # fmt: skip
def test_what_a_login_sends(
    make: Callable[..., Made], tmp_path: Path, settings: dict[str, Any], path: str, sent: dict[str, Any]
) -> None:
    (tmp_path / "secret").write_text("of-the-file\n")
    session, server, _ = make(**settings)
    held = session.token(FOREVER)
    assert session.principal == held.principal == "approle role r"
    ((where, what),) = server.sent
    assert where == f"/v1/auth/{path}/login" and isinstance(what, dict)
    assert {name: value for name, value in what.items() if value is not None} == {
        name: value for name, value in sent.items() if value is not None
    }
    session, server, _ = make(**settings)
    server.refusals = {where: 403}
    with pytest.raises(VaultRefusal) as caught:
        session.token(FOREVER)
    assert caught.value.login == next(iter(settings))


def test_the_last_renewal_says_that_it_is_the_last(make: Callable[..., Made]) -> None:
    session, server, clock = make()
    session.token(FOREVER)
    server.renewable = False
    clock.seconds += 60
    session.token(FOREVER)
    server.taken()
    clock.seconds += 60
    session.token(FOREVER)
    assert server.taken() == [("login", None), ("lookup-self", "t2")]


# --- after a refusal ---


def test_a_token_that_is_good_is_not_replaced(make: Callable[..., Made]) -> None:
    session, server, clock = make()
    held = session.token(FOREVER)
    assert session.replace(held, FOREVER) is None
    server.refusals = {LOOKUP: 403}
    clock.seconds += 1
    other = session.replace(held, FOREVER)
    assert other is not None and other.value.get_secret_value() == "t2" and not other.may_look_itself_up
    # Another thread did it meanwhile.
    server.taken()
    assert session.replace(held, FOREVER) is other and not server.taken()
    # It is unknown whether the token is valid: another login, but not one after the other.
    clock.seconds += 29
    assert session.replace(other, FOREVER) is None and server.logins == 2
    clock.seconds += 1
    third = session.replace(other, FOREVER)
    assert third is not None and third.value.get_secret_value() == "t3"


def test_a_server_that_is_away_says_nothing_of_a_token(make: Callable[..., Made]) -> None:
    session, server, _ = make()
    held = session.token(FOREVER)
    server.refusals = {LOOKUP: 503}
    with pytest.raises(VaultRefusal):
        session.replace(held, FOREVER)
    assert server.logins == 1 and session.token(FOREVER) is held
    # A recent login counts: no further one is made.
    session, server, _ = make()
    server.refusals = {LOOKUP: 503}
    assert session.token(FOREVER).value.get_secret_value() == "t1" and server.logins == 1


def test_only_a_token_of_our_own_is_revoked(make: Callable[..., Made]) -> None:
    session, server, _ = make()
    session.revoke(FOREVER)
    assert not server.taken()
    session.token(FOREVER)
    server.taken()
    session.revoke(FOREVER)
    session.revoke(FOREVER)
    assert server.taken() == [("revoke-self", "t1")]
    session, server, _ = make(token="given")
    session.token(FOREVER)
    server.taken()
    session.revoke(FOREVER)
    assert not server.taken() and session.principal == "token"


# --- tokens of others ---


def test_a_token_in_a_file_is_read_again(make: Callable[..., Made], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("one\n")
    session, server, clock = make(token_file="token")
    server.renewable = False
    held = session.token(FOREVER)
    (tmp_path / "token").write_text("two\n")
    clock.seconds += 59
    assert session.token(FOREVER) is held
    clock.seconds += 1
    assert session.token(FOREVER).value.get_secret_value() == "two"


def test_a_token_of_others_is_renewed_for_what_is_left_of_its_life(make: Callable[..., Made]) -> None:
    """No login can replace it."""
    session, server, clock = make(token="given")
    session.token(FOREVER)
    server.renewed_for = 9
    clock.seconds += 60
    held = session.token(FOREVER)
    assert held.ends_at == clock.seconds + 9
    server.renewed_for = 0
    server.taken()
    clock.seconds += 6
    assert session.token(FOREVER).value == held.value
    assert server.taken() == [("renew-self", "given"), ("lookup-self", "given")]


def test_a_new_token_in_the_file_may_look_itself_up_or_not(make: Callable[..., Made], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("one")
    session, server, clock = make(token_file="token")
    server.renewable = False
    session.token(FOREVER)
    clock.seconds += 60
    # The same token, which is valid.
    assert session.token(FOREVER).may_look_itself_up
    (tmp_path / "token").write_text("two")
    server.refusals = {LOOKUP: 403}
    clock.seconds += 60
    held = session.token(FOREVER)
    assert held.value.get_secret_value() == "two" and not held.may_look_itself_up


@pytest.mark.parametrize("way", ["dead", "may not list mounts", "may list them"])
def test_a_token_that_is_refused_and_is_all_there_is(make: Callable[..., Made], tmp_path: Path, way: str) -> None:
    (tmp_path / "token").write_text("one")
    session, server, _ = make(token_file="token")
    server.refusals = {LOOKUP: 403}
    held = session.token(FOREVER)
    mounts = "/v1/sys/internal/ui/mounts"
    server.refusals |= {"dead": {mounts: 403}, "may not list mounts": {mounts: 404}}.get(way, {})
    with pytest.raises(VaultRefusal) as caught:
        session.replace(held, FOREVER)
    reasons = {"dead": TOKEN_DEAD, "may not list mounts": TOKEN_UNKNOWN}
    assert (caught.value.status, caught.value.known) == (403, reasons.get(way))
    (tmp_path / "token").write_text("two")
    other = session.replace(held, FOREVER)
    assert other is not None and other.value.get_secret_value() == "two" and session.token(FOREVER) is other


def test_a_token_that_could_be_looked_up_and_cannot_any_more_is_dead(make: Callable[..., Made]) -> None:
    session, server, _ = make(token="given")
    held = session.token(FOREVER)
    server.refusals = {LOOKUP: 403}
    with pytest.raises(VaultRefusal) as caught:
        session.replace(held, FOREVER)
    assert caught.value.known is TOKEN_DEAD


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read (No such file or directory)"),
        (b"", "is empty, too long,"),
        (b" \n", "is empty, too long,"),
        (b"a b", "is empty, too long,"),
        (b"a\nb", "is empty, too long,"),
        (b"t\xf6k", "is empty, too long,"),
        (b"x" * (64 * 1024 + 1), "is empty, too long,"),
    ],
)
def test_a_secret_is_one_word(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(KmsConfigurationError) as caught:
        read_secret(path)
    assert reason in str(caught.value) and str(path) in str(caught.value)
    path.write_bytes(b"\n" + b"x" * (64 * 1024 - 1))
    assert len(read_secret(path).get_secret_value()) == 64 * 1024 - 1
