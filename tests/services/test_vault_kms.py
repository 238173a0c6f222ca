"""VaultKms against a real OpenBao server."""

from __future__ import annotations

import base64
import datetime
import http.server
import ipaddress
import json
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from openbao import OpenBao
from pydantic import ValidationError
from soak import SecondForm

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.errors import (
    KmsAccessDeniedError,
    KmsConfigurationError,
    KmsError,
    MasterKeyDisabledError,
    MasterKeyNotFoundError,
    WrappedKeyInvalidError,
)
from parquet_keytools.kms.client import KmsClient, RewrapRequest, UnwrapRequest, WrapRequest
from parquet_keytools.kms.contract_tests import KmsClientContract, rewrap_one, unwrap_one, wrap_one
from parquet_keytools.kms.http_session import HttpSession
from parquet_keytools.kms.vault import VaultKms, VaultServer, VaultSettings, open_session
from parquet_keytools.secret_bytes import SecretBytes

KEY = SecretBytes(bytes(range(16)))
WRITER = {"transit/encrypt/{}": ["update"], "transit/keys/{}": ["read"]}
READER = {"transit/decrypt/{}": ["update"]}
ROTATOR = {"transit/rewrap/{}": ["update"], "transit/keys/{}": ["read"]}
ALL = {
    "transit/encrypt/{}": ["update"],
    "transit/decrypt/{}": ["update"],
    "transit/rewrap/{}": ["update"],
    "transit/keys/{}": ["read"],
}


def rules(kind: dict[str, list[str]], *names: str) -> dict[str, list[str]]:
    return {path.format(name): allowed for path, allowed in kind.items() for name in names}


def vault_kms(server: OpenBao, folder: Path = Path(), **settings: Any) -> VaultKms:
    return VaultKms.from_settings(VaultSettings.model_validate({"url": server.url, **settings}), folder)


class RequestsSeen(list[tuple[str, str]]):
    """Method and path of every request that clients have sent since the last call of this object."""

    token = ""
    """The token in the last request."""

    def __call__(self) -> RequestsSeen:
        """Forget the requests up to now."""
        self.clear()
        return self


@pytest.fixture
def requests_seen(monkeypatch: pytest.MonkeyPatch) -> RequestsSeen:
    seen = RequestsSeen()
    send = HttpSession.request

    def counting(session: HttpSession, method: str, url: str, **arguments: Any) -> Any:
        seen.append((method.lower(), url.partition("/v1/")[2]))
        seen.token = arguments["headers"].get("X-Vault-Token", "")
        return send(session, method, url, **arguments)

    monkeypatch.setattr(HttpSession, "request", counting)
    return seen


class TestVaultContract(KmsClientContract):
    @pytest.fixture(autouse=True)
    def _server(self, openbao: OpenBao) -> None:
        self.server = openbao
        self.policy = openbao.write_policy(rules(ALL, "*"))

    @pytest.fixture
    def kms(self) -> Iterator[KmsClient]:
        with vault_kms(self.server, token=self.server.create_token(self.policy)) as kms:
            yield kms

    @pytest.fixture
    def master_key_id(self) -> str:
        return self.server.create_key()

    @pytest.fixture
    def other_master_key_id(self) -> str:
        return self.server.create_key(type="chacha20-poly1305")

    def disable_key(self, kms: KmsClient, master_key_id: str) -> None:
        self.server.disable_key(master_key_id)

    def deny_key(self, kms: KmsClient, master_key_id: str) -> None:
        denied = {path: ["deny"] for path in rules(ALL, master_key_id)}
        self.server.write_policy({**rules(ALL, "*"), **denied}, self.policy)

    def add_version(self, kms: KmsClient, master_key_id: str) -> None:
        self.server.rotate_key(master_key_id)


class TestVaultContractWithDerivedKeys(SecondForm, TestVaultContract):
    """The same with keys derived for each context."""

    @pytest.fixture
    def kms(self) -> Iterator[KmsClient]:
        token = self.server.create_token(self.policy)
        with vault_kms(self.server, token=token, context={"tenant": "a", "use": "parquet"}) as kms:
            yield kms

    @pytest.fixture
    def master_key_id(self) -> str:
        return self.server.create_key(derived=True)

    @pytest.fixture
    def other_master_key_id(self) -> str:
        return self.server.create_key(derived=True, type="xchacha20-poly1305")


@pytest.fixture
def kms(openbao: OpenBao) -> Iterator[VaultKms]:
    policy = openbao.write_policy(rules(ALL, "*"))
    with vault_kms(openbao, token=openbao.create_token(policy)) as kms:
        yield kms


# --- master keys ---


def test_the_raw_form_is_the_text_of_the_server(kms: VaultKms, openbao: OpenBao) -> None:
    name = openbao.create_key()
    raw = kms.wrap_raw(KEY, name)
    assert raw.startswith(b"vault:v1:")
    assert unwrap_one(kms, raw.decode("ascii"), name) == kms.unwrap_raw(raw, name) == KEY
    for damaged in (raw[:-2], raw.replace(b"vault", b"v\xffult"), b"keys", b""):
        with pytest.raises(WrappedKeyInvalidError):
            kms.unwrap_raw(damaged, name)


def test_the_server_moves_no_key_to_another_master_key(kms: VaultKms) -> None:
    """A rotation that moves keys unwraps them, and the server re-wraps keys under a newer version."""
    assert kms.rewraps_by_itself("one", "one") is True
    assert kms.rewraps_by_itself("one", "two") is False


def test_a_missing_key_is_never_created_even_by_a_token_that_may(openbao: OpenBao) -> None:
    with vault_kms(openbao, token=openbao.root_token) as kms:
        with pytest.raises(MasterKeyNotFoundError):
            wrap_one(kms, KEY, "mistyped")
        # A key that existed a moment ago: only the request itself can keep the engine from creating it.
        name = openbao.create_key()
        wrap_one(kms, KEY, name)
        openbao.configure_key(name, deletion_allowed=True)
        openbao.ask("DELETE", f"transit/keys/{name}")
        for _ in range(2):
            with pytest.raises(MasterKeyNotFoundError):
                wrap_one(kms, KEY, name)
    assert not openbao.has_key("mistyped") and not openbao.has_key(name)


@pytest.mark.parametrize("name", ["../../transit/keys/elsewhere", "a/../elsewhere", "elsewhere/../elsewhere"])
def test_no_key_is_created_under_a_name_that_leads_elsewhere(openbao: OpenBao, name: str) -> None:
    with vault_kms(openbao, token=openbao.root_token) as kms, pytest.raises(MasterKeyNotFoundError, match="name"):
        kms.create_master_key(name)
    assert not openbao.has_key("elsewhere")


def test_a_missing_key_is_not_created_by_a_token_that_may_create_but_not_read(openbao: OpenBao) -> None:
    name = openbao.new_name()
    policy = openbao.write_policy({"transit/encrypt/*": ["create", "update"]})
    with vault_kms(openbao, token=openbao.create_token(policy)) as kms, pytest.raises(MasterKeyNotFoundError):
        wrap_one(kms, KEY, name)
    assert not openbao.has_key(name)


@pytest.mark.parametrize(
    "name", ["", "a/b", "../sys/seal", "a..b", ".a", "a.", "a?b", "a b", "ä", "a%2fb", "a#", "a\n"]
)
def test_only_names_of_keys_are_asked_for(
    kms: VaultKms, openbao: OpenBao, name: str, requests_seen: RequestsSeen
) -> None:
    wrapped = wrap_one(kms, KEY, openbao.create_key())
    seen = requests_seen()
    for call in (
        lambda: wrap_one(kms, KEY, name),
        lambda: unwrap_one(kms, wrapped, name),
        lambda: rewrap_one(kms, wrapped, name, name),
        lambda: kms.describe(name),
    ):
        with pytest.raises(MasterKeyNotFoundError, match="not a valid name of a transit key"):
            call()
    assert seen == []


@pytest.mark.parametrize("type_", ["rsa-2048", "ed25519"])
def test_keys_that_do_not_authenticate_are_refused(kms: VaultKms, openbao: OpenBao, type_: str) -> None:
    name = openbao.create_key(type=type_)
    with pytest.raises(KmsConfigurationError, match=type_):
        wrap_one(kms, KEY, name)
    assert not kms.describe(name).enabled


@pytest.mark.parametrize("type_", ["aes128-gcm96", "aes256-gcm96", "chacha20-poly1305", "xchacha20-poly1305"])
def test_all_types_that_authenticate_wrap(kms: VaultKms, openbao: OpenBao, type_: str) -> None:
    name = openbao.create_key(type=type_)
    assert unwrap_one(kms, wrap_one(kms, KEY, name), name) == KEY


def test_describe_knows_versions_and_origin(kms: VaultKms, openbao: OpenBao) -> None:
    name = openbao.create_key()
    for _ in range(3):
        openbao.rotate_key(name)
    openbao.configure_key(name, min_decryption_version=2)
    description = kms.describe(name)
    assert (description.enabled, description.current_version) == (True, "4")
    assert description.origin == "transit"
    assert description.rotates is False
    openbao.configure_key(name, auto_rotate_period="24h")
    assert kms.describe(name).rotates is True


def test_when_versions_were_created(kms: VaultKms, openbao: OpenBao) -> None:
    name = openbao.create_key()
    openbao.rotate_key(name)
    dates = kms.version_dates(name)
    assert list(dates) == ["1", "2"]
    assert 0 <= (dates["2"] - dates["1"]).total_seconds() < 60
    assert abs(time.time() - dates["2"].timestamp()) < 600


def test_a_version_that_is_too_old_is_disabled(kms: VaultKms, openbao: OpenBao) -> None:
    name = openbao.create_key()
    wrapped = wrap_one(kms, KEY, name)
    openbao.rotate_key(name)
    openbao.configure_key(name, min_decryption_version=2)
    for call in (lambda: unwrap_one(kms, wrapped, name), lambda: rewrap_one(kms, wrapped, name)):
        with pytest.raises(MasterKeyDisabledError, match="min_decryption_version"):
            call()
    openbao.configure_key(name, min_decryption_version=1)
    assert unwrap_one(kms, wrapped, name) == KEY


def test_other_spellings_of_a_wrapped_key_are_refused(kms: VaultKms, openbao: OpenBao) -> None:
    """The server itself accepts all of these."""
    name = openbao.create_key()
    wrapped = wrap_one(kms, KEY, name)
    body = wrapped.removeprefix("vault:v1:")
    for other in (f"vault:v0:{body}", f"vault:v01:{body}", f"vault:v1:{body[:8]}\n{body[8:]}"):
        answer = openbao.ask("POST", f"transit/decrypt/{name}", {"ciphertext": other})
        assert answer.content["data"]["plaintext"] == base64.b64encode(KEY.reveal()).decode()
        with pytest.raises(WrappedKeyInvalidError):
            unwrap_one(kms, other, name)
        with pytest.raises(WrappedKeyInvalidError):
            rewrap_one(kms, other, name)


# --- context ---


def test_a_context_is_needed_by_derived_keys_and_refused_by_others(openbao: OpenBao) -> None:
    derived, plain = openbao.create_key(derived=True), openbao.create_key()
    token = openbao.create_token(openbao.write_policy(rules(ALL, "*")))
    with vault_kms(openbao, token=token) as without, vault_kms(openbao, token=token, context="c") as with_context:
        wrapped = {derived: wrap_one(with_context, KEY, derived), plain: wrap_one(without, KEY, plain)}
        for kms, name, text in ((without, derived, "needs a context"), (with_context, plain, "not a derived key")):
            for call in (
                lambda kms=kms, name=name: wrap_one(kms, KEY, name),
                lambda kms=kms, name=name: unwrap_one(kms, wrapped[name], name),
                lambda kms=kms, name=name: rewrap_one(kms, wrapped[name], name),
            ):
                with pytest.raises(KmsConfigurationError, match=text):
                    call()


def test_another_context_does_not_unwrap(openbao: OpenBao) -> None:
    name = openbao.create_key(derived=True)
    token = openbao.create_token(openbao.write_policy(rules(ALL, "*")))
    with (
        vault_kms(openbao, token=token, context={"a": "1", "b": "2"}) as one,
        vault_kms(openbao, token=token, context={"b": "2", "a": "1"}) as same,
        vault_kms(openbao, token=token, context={"a": "1", "b": "3"}) as other,
    ):
        wrapped = wrap_one(one, KEY, name)
        assert unwrap_one(same, rewrap_one(same, wrapped, name), name) == KEY
        with pytest.raises(WrappedKeyInvalidError):
            unwrap_one(other, wrapped, name)


def test_with_a_context_a_writer_must_be_able_to_read_the_key(openbao: OpenBao) -> None:
    name = openbao.create_key(derived=True)
    policy = openbao.write_policy({f"transit/{action}/{name}": ["update"] for action in ("encrypt", "decrypt")})
    with vault_kms(openbao, token=openbao.create_token(policy), context="c") as kms:
        with pytest.raises(KmsAccessDeniedError, match=f"`read` on transit/keys/{name}"):
            wrap_one(kms, KEY, name)
        with vault_kms(openbao, token=openbao.root_token, context="c") as operator:
            assert unwrap_one(kms, wrap_one(operator, KEY, name), name) == KEY


# --- batches ---


def test_many_keys_go_in_batches(kms: VaultKms, openbao: OpenBao, requests_seen: RequestsSeen) -> None:
    one, two = openbao.create_key(), openbao.create_key()
    kms.wrap_many([WrapRequest(KEY, one), WrapRequest(KEY, two)])
    seen = requests_seen()
    keys = [SecretBytes.random(256) for _ in range(250)]
    wrapped = kms.wrap_many([WrapRequest(key, (one, two)[place % 2]) for place, key in enumerate(keys)])
    assert sorted(path for _, path in seen) == sorted(
        [f"transit/encrypt/{one}"] * 2 + [f"transit/encrypt/{two}"] * 2
    )
    seen.clear()
    requests = [UnwrapRequest(str(text), (one, two)[place % 2]) for place, text in enumerate(wrapped)]
    assert kms.unwrap_many(requests) == keys
    assert len(seen) == 4
    seen.clear()
    moves = [RewrapRequest(r.wrapped_key, r.master_key_id, r.master_key_id) for r in requests]
    again = kms.rewrap_many(moves)
    assert {path.split("/")[1] for _, path in seen} == {"rewrap"} and len(seen) == 4
    assert (
        kms.unwrap_many([UnwrapRequest(str(t), r.master_key_id) for t, r in zip(again, requests, strict=True)])
        == keys
    )


def test_batches_that_are_too_large_are_halved_and_stay_small(
    openbao: OpenBao, requests_seen: RequestsSeen
) -> None:
    name = openbao.create_key(derived=True)
    with vault_kms(openbao, token=openbao.root_token, batch_size=1000, context="c") as kms:
        keys = [SecretBytes.random(128) for _ in range(1000)]
        wrapped = kms.wrap_many([WrapRequest(key, name) for key in keys])
        seen = requests_seen()
        assert kms.unwrap_many([UnwrapRequest(str(text), name) for text in wrapped]) == keys
        # 1,000 keys with their contexts are too many for one request, and so are 500; 250 fit.
        assert len(seen) == len([path for _, path in seen if "decrypt" in path]) <= 8


def test_one_failure_in_a_batch_is_its_own_only(kms: VaultKms, openbao: OpenBao) -> None:
    name = openbao.create_key()
    wrapped = wrap_one(kms, KEY, name)
    forged = wrapped[:-8] + ("AAAAAAA=" if wrapped.endswith("=") else "AAAAAAAA")
    outcomes = kms.unwrap_many([UnwrapRequest(text, name) for text in (wrapped, forged)])
    assert outcomes[0] == KEY and isinstance(outcomes[1], WrappedKeyInvalidError)
    # With nothing but failures, the server answers 400 with results.
    (outcome,) = kms.unwrap_many([UnwrapRequest(forged, name)])
    assert isinstance(outcome, WrappedKeyInvalidError)


# --- permissions ---


def test_the_writer_policy_suffices_and_is_no_more(openbao: OpenBao) -> None:
    name = openbao.create_key()
    with vault_kms(openbao, token=openbao.create_token(openbao.write_policy(rules(WRITER, name)))) as kms:
        wrapped = wrap_one(kms, KEY, name)
        assert kms.describe(name).enabled
        for call in (lambda: unwrap_one(kms, wrapped, name), lambda: rewrap_one(kms, wrapped, name)):
            with pytest.raises(KmsAccessDeniedError):
                call()


def test_a_rotation_reads_a_key_once(openbao: OpenBao, requests_seen: RequestsSeen) -> None:
    """It looks at the versions of each of a thousand tenants' keys, and then re-wraps under it."""
    name = openbao.create_key()
    with vault_kms(openbao, token=openbao.root_token) as kms:
        wrapped = wrap_one(kms, KEY, name)
    openbao.rotate_key(name)
    with vault_kms(openbao, token=openbao.root_token) as kms:
        seen = requests_seen()
        assert kms.describe(name).current_version == "2"
        assert kms.wrapped_key_version(rewrap_one(kms, wrapped, name), name) == "2"
        assert [path for _, path in seen if name in path] == [f"transit/keys/{name}", f"transit/rewrap/{name}"]


def test_a_writer_without_read_can_write(openbao: OpenBao, requests_seen: RequestsSeen) -> None:
    name = openbao.create_key()
    policy = openbao.write_policy({f"transit/encrypt/{name}": ["update"]})
    with vault_kms(openbao, token=openbao.create_token(policy)) as kms:
        seen = requests_seen()
        for _ in range(3):
            wrap_one(kms, KEY, name)
        assert len([path for _, path in seen if "keys/" in path]) == 1
        with pytest.raises(KmsAccessDeniedError):
            kms.describe(name)


def test_the_reader_policy_suffices_and_is_no_more(kms: VaultKms, openbao: OpenBao) -> None:
    name = openbao.create_key()
    wrapped = wrap_one(kms, KEY, name)
    with vault_kms(openbao, token=openbao.create_token(openbao.write_policy(rules(READER, name)))) as reader:
        assert unwrap_one(reader, wrapped, name) == KEY
        for call in (lambda: wrap_one(reader, KEY, name), lambda: rewrap_one(reader, wrapped, name)):
            with pytest.raises(KmsAccessDeniedError):
                call()


def test_the_rotator_policy_suffices_and_is_no_more(kms: VaultKms, openbao: OpenBao) -> None:
    name = openbao.create_key()
    wrapped = wrap_one(kms, KEY, name)
    openbao.rotate_key(name)
    with vault_kms(openbao, token=openbao.create_token(openbao.write_policy(rules(ROTATOR, name)))) as rotator:
        again = rewrap_one(rotator, wrapped, name)
        assert rotator.wrapped_key_version(again, name) == "2"
        for call in (lambda: wrap_one(rotator, KEY, name), lambda: unwrap_one(rotator, wrapped, name)):
            with pytest.raises(KmsAccessDeniedError):
                call()
    assert unwrap_one(kms, again, name) == KEY


# --- tokens ---


def test_a_token_is_renewed_in_time(openbao: OpenBao, requests_seen: RequestsSeen) -> None:
    name = openbao.create_key()
    token = openbao.create_token(openbao.write_policy(rules(ALL, name)), ttl="4s")
    with vault_kms(openbao, token=token) as kms:
        seen = requests_seen()
        started = time.monotonic()
        while (seconds := time.monotonic() - started) < 6:
            wrap_one(kms, KEY, name)
            time.sleep(0.1)
        renewals = [path for _, path in seen if path == "auth/token/renew-self"]
        assert 1 <= len(renewals) <= seconds / 2
        assert len([path for _, path in seen if "lookup-self" in path]) == 1


def test_a_given_token_that_has_expired_says_so(openbao: OpenBao) -> None:
    name = openbao.create_key()
    token = openbao.create_token(openbao.write_policy(rules(ALL, name)), ttl="4s", renewable=False)
    with vault_kms(openbao, token=token) as kms:
        wrapped = wrap_one(kms, KEY, name)
        time.sleep(4.3)
        for _ in range(2):
            with pytest.raises(KmsConfigurationError, match="the token has expired"):
                unwrap_one(kms, wrapped, name)


def test_a_given_token_that_was_revoked_says_so(openbao: OpenBao) -> None:
    name = openbao.create_key()
    token = openbao.create_token(openbao.write_policy(rules(ALL, name)))
    with vault_kms(openbao, token=token) as kms:
        wrap_one(kms, KEY, name)
        openbao.revoke_token(token)
        for _ in range(2):
            with pytest.raises(KmsConfigurationError, match="was revoked"):
                wrap_one(kms, KEY, name)
    for dead in ("s.never-was", token):
        # Not "access denied": readers may hide columns then.
        with (
            vault_kms(openbao, token=dead) as kms,
            pytest.raises(KmsConfigurationError, match="the token has expired"),
        ):
            wrap_one(kms, KEY, name)


def test_a_token_file_is_read_again(openbao: OpenBao, tmp_path: Path) -> None:
    name = openbao.create_key()
    policy = openbao.write_policy(rules(ALL, name))
    first, second = openbao.create_token(policy), openbao.create_token(policy)
    (tmp_path / "token").write_text(first + "\n")
    with vault_kms(openbao, tmp_path, token_file="token") as kms:
        wrap_one(kms, KEY, name)
        (tmp_path / "token").write_text(second + "\n")
        openbao.revoke_token(first)
        wrap_one(kms, KEY, name)
    assert openbao.token_is_valid(second), "a given token is not ours to revoke"


@pytest.fixture
def approle(openbao: OpenBao) -> Callable[..., dict[str, Any]]:
    def make(*policies: str, **options: object) -> dict[str, Any]:
        mount = openbao.enable_auth("approle")
        role_id, secret_id = openbao.create_approle(mount, *policies, **options)
        return {"approle": {"role_id": role_id, "secret_id": secret_id, "mount": mount}}

    return make


def test_approle_renews_then_logs_in_again(
    openbao: OpenBao, approle: Callable[..., dict[str, Any]], requests_seen: RequestsSeen
) -> None:
    name = openbao.create_key()
    login = approle(openbao.write_policy(rules(ALL, name)), token_ttl="2s", token_max_ttl="4s")
    with vault_kms(openbao, **login) as kms:
        seen = requests_seen()
        logins = renewals = 0
        started = time.monotonic()
        while (seconds := time.monotonic() - started) < 60 and (logins < 2 or renewals < 2):
            wrap_one(kms, KEY, name)
            time.sleep(0.05)
            logins = len([path for _, path in seen if path.endswith("/login")])
            renewals = len([path for _, path in seen if path == "auth/token/renew-self"])
        assert logins == 2 and renewals >= 2
        assert 3 * renewals < kms.call_counts["wrap"], "not for each call"
        assert logins <= 1 + seconds / 1.3


def test_a_revoked_token_of_a_login_is_replaced_once_for_all_threads(
    openbao: OpenBao, approle: Callable[..., dict[str, Any]], requests_seen: RequestsSeen
) -> None:
    name = openbao.create_key()
    with vault_kms(openbao, **approle(openbao.write_policy(rules(ALL, name)))) as kms:
        wrap_one(kms, KEY, name)
        seen = requests_seen()
        openbao.revoke_token(seen.token)
        threads = [threading.Thread(target=wrap_one, args=(kms, KEY, name)) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert kms.call_counts["wrap"] == 17
        assert len([path for _, path in seen if path.endswith("/login")]) == 1
        wrap_one(kms, KEY, name)


def test_a_denied_key_is_no_reason_to_log_in_again(
    openbao: OpenBao, approle: Callable[..., dict[str, Any]], requests_seen: RequestsSeen
) -> None:
    with vault_kms(openbao, **approle("default")) as kms:
        seen = requests_seen()
        for _ in range(3):
            with pytest.raises(KmsAccessDeniedError):
                wrap_one(kms, KEY, "some-key")
        assert len([path for _, path in seen if path.endswith("/login")]) == 1


def test_a_login_works_without_the_default_policy(
    openbao: OpenBao, approle: Callable[..., dict[str, Any]], requests_seen: RequestsSeen
) -> None:
    name = openbao.create_key()
    login = approle(openbao.write_policy(rules(READER, name)), token_no_default_policy=True)
    with vault_kms(openbao, token=openbao.root_token) as operator:
        wrapped = wrap_one(operator, KEY, name)
    with vault_kms(openbao, **login) as kms:
        seen = requests_seen()
        assert unwrap_one(kms, wrapped, name) == KEY
        for _ in range(3):
            with pytest.raises(KmsAccessDeniedError):
                wrap_one(kms, KEY, name)
        assert len([path for _, path in seen if path.endswith("/login")]) == 1


def test_a_login_with_a_wrong_secret_is_no_denied_key(
    openbao: OpenBao, approle: Callable[..., dict[str, Any]]
) -> None:
    login = approle("default")
    login["approle"]["secret_id"] = "CANARY-secret"
    with vault_kms(openbao, **login) as kms:
        with pytest.raises(KmsConfigurationError, match="login with approle was refused") as caught:
            wrap_one(kms, KEY, "any")
        assert "CANARY" not in str(caught.value)
    login["approle"]["mount"] = "no-such-mount"
    with vault_kms(openbao, **login) as kms, pytest.raises(KmsConfigurationError, match="login with approle"):
        wrap_one(kms, KEY, "any")


def test_closing_revokes_what_a_login_gave(
    openbao: OpenBao, approle: Callable[..., dict[str, Any]], requests_seen: RequestsSeen
) -> None:
    name = openbao.create_key()
    kms = vault_kms(openbao, **approle(openbao.write_policy(rules(ALL, name))))
    wrap_one(kms, KEY, name)
    token = requests_seen.token
    assert openbao.token_is_valid(token)
    kms.close()
    assert not openbao.token_is_valid(token)
    wrap_one(kms, KEY, name)  # a call after it makes a new connection
    kms.close()


def test_it_says_who_it_is(openbao: OpenBao, approle: Callable[..., dict[str, Any]]) -> None:
    name = openbao.create_key()
    login = approle(openbao.write_policy(rules(ALL, name)))
    with vault_kms(openbao, **login) as kms:
        assert kms._principal() == login["approle"]["mount"]
        wrap_one(kms, KEY, name)
        assert "role-" in kms._principal()
        assert login["approle"]["secret_id"] not in kms._principal()
    token = openbao.create_token("default", display_name="nightly job")
    with vault_kms(openbao, token=token) as kms:
        with pytest.raises(KmsAccessDeniedError):
            wrap_one(kms, KEY, name)
        assert kms._principal() == "token-nightly-job"


def test_a_child_process_logs_in_for_itself(
    openbao: OpenBao, approle: Callable[..., dict[str, Any]], requests_seen: RequestsSeen
) -> None:
    name = openbao.create_key()
    with vault_kms(openbao, **approle(openbao.write_policy(rules(ALL, name)))) as kms:
        wrapped = wrap_one(kms, KEY, name)
        child = os.fork()
        if child == 0:
            ok = False
            try:
                ok = unwrap_one(kms, wrapped, name) == KEY
                kms.close()
            finally:
                os._exit(0 if ok else 1)
        assert os.waitpid(child, 0)[1] == 0
        # The child's close did not revoke the token of its parent.
        seen = requests_seen()
        assert unwrap_one(kms, wrapped, name) == KEY
        assert not [path for _, path in seen if path.endswith("/login")]


# --- logins with JSON Web Tokens ---


def b64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def json_web_token(key: rsa.RSAPrivateKey, **claims: object) -> str:
    now = int(time.time())
    everything = {"iat": now, "nbf": now - 5, "exp": now + 600, **claims}
    parts = [b64url(json.dumps(part).encode()) for part in ({"alg": "RS256", "typ": "JWT"}, everything)]
    signature = key.sign(".".join(parts).encode(), padding.PKCS1v15(), hashes.SHA256())
    return ".".join([*parts, b64url(signature)])


@pytest.fixture(scope="module")
def rsa_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


def public_pem(key: rsa.RSAPrivateKey) -> str:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.PEM, form).decode()


def test_jwt(openbao: OpenBao, rsa_key: rsa.RSAPrivateKey, tmp_path: Path) -> None:
    name = openbao.create_key()
    mount = openbao.enable_auth("jwt")
    openbao.ask("POST", f"auth/{mount}/config", {"jwt_validation_pubkeys": [public_pem(rsa_key)]})
    role = {
        "role_type": "jwt",
        "user_claim": "sub",
        "bound_audiences": ["parquet"],
        "token_policies": [openbao.write_policy(rules(ALL, name))],
    }
    openbao.ask("POST", f"auth/{mount}/role/writer", role)
    good = json_web_token(rsa_key, sub="ci-job", aud="parquet")
    (tmp_path / "jwt").write_text(good)
    for way in ({"jwt": good}, {"jwt_file": "jwt"}):
        with vault_kms(openbao, tmp_path, jwt={"role": "writer", "mount": mount, **way}) as kms:
            assert unwrap_one(kms, wrap_one(kms, KEY, name), name) == KEY
            assert "ci-job" in kms._principal()
    bad = json_web_token(rsa_key, sub="ci-job", aud="other")
    with (
        vault_kms(openbao, jwt={"role": "writer", "mount": mount, "jwt": bad}) as kms,
        pytest.raises(KmsConfigurationError, match="login with jwt was refused"),
    ):
        wrap_one(kms, KEY, name)


class TokenReviewApi(http.server.BaseHTTPRequestHandler):
    """The part of the Kubernetes API that says which account a token belongs to."""

    good_token = ""
    asked = 0

    def do_POST(self) -> None:
        review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        TokenReviewApi.asked += 1
        status: dict[str, Any] = {"authenticated": False, "error": "no such token"}
        if review["spec"]["token"] == self.good_token:
            user = {
                "username": "system:serviceaccount:flights:writer",
                "uid": "1",
                "groups": ["system:serviceaccounts"],
            }
            status = {"authenticated": True, "user": user}
        body = json.dumps(
            {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "status": status}
        ).encode()
        self.send_response(201)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def test_kubernetes(openbao: OpenBao, rsa_key: rsa.RSAPrivateKey, tmp_path: Path) -> None:
    name = openbao.create_key()
    claims = {
        "iss": "kubernetes/serviceaccount",
        "sub": "system:serviceaccount:flights:writer",
        "kubernetes.io/serviceaccount/namespace": "flights",
        "kubernetes.io/serviceaccount/service-account.name": "writer",
        "kubernetes.io/serviceaccount/service-account.uid": "1",
    }
    TokenReviewApi.good_token = json_web_token(rsa_key, **claims)
    api = http.server.ThreadingHTTPServer(("127.0.0.1", 0), TokenReviewApi)
    threading.Thread(target=api.serve_forever, daemon=True).start()
    try:
        mount = openbao.enable_auth("kubernetes")
        host = f"http://127.0.0.1:{api.server_address[1]}"
        configuration = {
            "kubernetes_host": host,
            "token_reviewer_jwt": TokenReviewApi.good_token,
            "pem_keys": [public_pem(rsa_key)],
            "kubernetes_ca_cert": Authority(tmp_path, "kubernetes").file.read_text(),
            "disable_local_ca_jwt": True,
        }
        openbao.ask("POST", f"auth/{mount}/config", configuration)
        role = {
            "bound_service_account_names": ["writer"],
            "bound_service_account_namespaces": ["flights"],
            "token_policies": [openbao.write_policy(rules(ALL, name))],
        }
        openbao.ask("POST", f"auth/{mount}/role/writer", role)
        (tmp_path / "token").write_text(TokenReviewApi.good_token)
        login = {"role": "writer", "jwt_path": "token", "mount": mount}
        with vault_kms(openbao, tmp_path, kubernetes=login) as kms:
            assert unwrap_one(kms, wrap_one(kms, KEY, name), name) == KEY
            assert "flights-writer" in kms._principal()
        assert TokenReviewApi.asked == 1
        (tmp_path / "token").write_text(json_web_token(rsa_key, **claims, jti="another"))
        with (
            vault_kms(openbao, tmp_path, kubernetes=login) as kms,
            pytest.raises(KmsConfigurationError, match="login with kubernetes was refused"),
        ):
            wrap_one(kms, KEY, name)
        (tmp_path / "token").unlink()
        with (
            vault_kms(openbao, tmp_path, kubernetes=login) as kms,
            pytest.raises(KmsConfigurationError, match="cannot be read"),
        ):
            wrap_one(kms, KEY, name)
    finally:
        api.shutdown()
        api.server_close()


# --- mounts and namespaces ---


def test_mount_points_and_namespaces(openbao: OpenBao) -> None:
    openbao.ask("POST", "sys/namespaces/team")
    openbao.ask("POST", "sys/mounts/deep/transit", {"type": "transit"}, namespace="team")
    openbao.ask("POST", "deep/transit/keys/one", {}, namespace="team")
    with vault_kms(openbao, token=openbao.root_token, namespace="team", mount_point="deep/transit") as kms:
        assert unwrap_one(kms, wrap_one(kms, KEY, "one"), "one") == KEY
    wrongs: list[dict[str, Any]] = [
        {"mount_point": "deep/transit"},
        {"namespace": "team"},
        {"namespace": "nobody"},
        {"mount_point": "sys"},
    ]
    for wrong in wrongs:
        with vault_kms(openbao, token=openbao.root_token, **wrong) as kms:
            for call in (lambda kms=kms: wrap_one(kms, KEY, "one"), lambda kms=kms: kms.describe("one")):
                with pytest.raises(KmsConfigurationError):
                    call()


# --- TLS ---


class Authority:
    """Makes certificates."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.file = folder / f"{name}.pem"
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        certificate = (
            self._builder(self.name, self.key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self.key.public_key()), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        self.file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )

    def issue(self, name: str) -> tuple[Path, Path]:
        key = ec.generate_private_key(ec.SECP256R1())
        addresses = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            self._builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key)
            .add_extension(x509.SubjectAlternativeName(addresses), critical=False)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False
            )
            .sign(self.key, hashes.SHA256())
        )
        files = self.folder / f"{name}.pem", self.folder / f"{name}-key.pem"
        files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        files[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return files


def test_tls_with_an_authority_of_ones_own_and_client_certificates(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path, "authority"), Authority(tmp_path, "stranger")
    certificate, key = authority.issue("server")
    client, client_key = authority.issue("client")
    stranger.issue("intruder")
    tls = [
        f'tls_cert_file = "{certificate}"',
        f'tls_key_file = "{key}"',
        f'tls_client_ca_file = "{authority.file}"',
        "tls_require_and_verify_client_cert = true",
    ]
    server = OpenBao(tmp_path, tls=tls, in_memory=True)
    server.operator.verify = str(authority.file)
    server.operator.cert = (str(client), str(client_key))
    try:
        server.start()
        name = server.create_key()
        # The server may hang up before its reason is read: then only another attempt learns it.
        good = {"token": server.root_token, "ca_file": "authority.pem", "max_tries": 20}
        pair = {"client_cert": "client.pem", "client_key": "client-key.pem"}
        with vault_kms(server, tmp_path, **good, **pair) as kms:
            assert unwrap_one(kms, wrap_one(kms, KEY, name), name) == KEY
        for wrong, text in (
            (good, "TLS failed"),
            ({**good, "client_cert": "intruder.pem", "client_key": "intruder-key.pem"}, "TLS failed"),
            ({**good, **pair, "ca_file": "stranger.pem"}, "not trusted"),
            ({**good, **pair, "ca_file": None}, "not trusted"),
            ({**good, **pair, "ca_file": "missing.pem"}, "there is no file"),
            (
                {**good, **pair, "url": server.url.replace("https", "http")},
                "rejects the request as invalid|not JSON",
            ),
        ):
            with vault_kms(server, tmp_path, **wrong) as kms, pytest.raises(KmsError, match=text) as caught:
                wrap_one(kms, KEY, name)
            assert isinstance(caught.value, KmsConfigurationError), wrong
    finally:
        server.stop()


def test_tls_files_that_are_of_no_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found before anything is sent: it is not an unreachable server, and there is no prompt for a passphrase."""
    monkeypatch.setattr(VaultServer, "request", lambda *_: pytest.fail("it was asked"))
    authority = Authority(tmp_path, "authority")
    authority.issue("client")
    authority.issue("other")
    (tmp_path / "no.pem").write_text("no certificate", encoding="utf-8")
    key = serialization.load_pem_private_key((tmp_path / "client-key.pem").read_bytes(), None)
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"passphrase"),
    )
    (tmp_path / "locked-key.pem").write_bytes(locked)
    (tmp_path / "locked.pem").write_bytes(locked + (tmp_path / "client.pem").read_bytes())
    good = {"url": "https://vault.example", "token": "t", "ca_file": "authority.pem"}
    for wrong in (
        {"ca_file": "no.pem"},
        {"client_cert": "no.pem"},
        {"client_cert": "client.pem"},
        {"client_cert": "client.pem", "client_key": "no.pem"},
        {"client_cert": "client.pem", "client_key": "other-key.pem"},
        {"client_cert": "client.pem", "client_key": "locked-key.pem"},
        {"client_cert": "locked.pem"},
    ):
        kms = VaultKms(VaultSettings.model_validate(good | wrong), tmp_path)
        with pytest.raises(KmsConfigurationError, match="cannot be used") as caught:
            unwrap_one(kms, "vault:v1:" + "A" * 64, "k")
        assert str(tmp_path) in str(caught.value) and caught.value.tries == 1


# --- settings ---


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({}, "give one of"),
        ({"token": "t", "token_file": "f"}, "give one of"),
        ({"token": "t", "url": "http://vault.example:8200"}, "without TLS"),
        ({"token": "t", "url": "ftp://vault.example"}, "must be an address"),
        ({"token": "t", "url": "https://user:CANARY@vault.example"}, "only scheme, host"),
        ({"token": "t", "url": "https://[::1"}, "must be an address"),
        ({"token": "t", "mount_point": "../sys"}, "mount point"),
        ({"token": "t", "mount_point": "a/../sys"}, "mount point"),
        ({"token": "t", "namespace": "a\nb"}, "namespace"),
        ({"token": "t", "client_key": "k"}, "client_cert"),
        ({"jwt": {"role": "r"}}, "jwt_file"),
        ({"approle": {"role_id": "r", "secret_id": "CANARY", "secret_id_file": "f"}}, "secret_id_file"),
        ({"token": "t", "verify": False}, "Extra inputs"),
        ({"token": "t", "proxy": "CANARY:3128"}, "proxy must be an address"),
        (
            {"token": "t", "url": "http://127.0.0.1:8200", "proxy": "http://u:CANARY@proxy.example:3128"},
            "the proxy can read the keys",
        ),
    ],
)
def test_mistakes_in_settings(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text) as caught:
        VaultSettings.model_validate({"url": "https://vault.example:8200", **wrong})
    assert "CANARY" not in str(caught.value)


def test_settings_that_may_be() -> None:
    for url in ("http://127.0.0.1:8200", "http://localhost:8200", "http://[::1]:8200", "https://a.example/vault/"):
        VaultSettings.model_validate({"url": url, "token": "t"})
    VaultSettings.model_validate({"url": "http://vault.example", "allow_http": True, "token": "t"})
    for url, proxy in (
        ("https://vault.example", "http://proxy.example:3128"),
        ("http://[::1]", "http://127.0.0.1:1"),
    ):
        VaultSettings.model_validate({"url": url, "proxy": proxy, "token": "t"})


def test_the_password_of_a_proxy_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = "http://user:CANARY@proxy.example:3128"
    shown = VaultSettings.model_validate({"url": "https://vault.example", "proxy": proxy, "token": "t"})
    assert "CANARY" not in f"{shown!r}{shown.model_dump()}{shown.model_dump_json()}"
    assert open_session(shown, Path()).proxies == {"http": proxy, "https": proxy}
    monkeypatch.setenv("PROXY", proxy)
    monkeypatch.setenv("TOKEN", "CANARY")
    kms = {"type": "vault", "url": "https://vault.example", "proxy": "${PROXY}", "token": "${TOKEN}"}
    assert b"CANARY" not in pickle.dumps(parse_configuration({"version": 1, "kms": kms}))


@pytest.mark.parametrize("token", ["", "a b", "a\nX-Other: 1", "é"])
def test_a_token_that_is_none_is_refused_before_it_is_sent(openbao: OpenBao, token: str) -> None:
    with vault_kms(openbao, token=token) as kms, pytest.raises(KmsConfigurationError, match="the token is empty"):
        wrap_one(kms, KEY, "any")


def test_nothing_shows_tokens_and_keys(
    openbao: OpenBao,
    caplog: pytest.LogCaptureFixture,
    approle: Callable[..., dict[str, Any]],
    requests_seen: RequestsSeen,
) -> None:
    caplog.set_level(logging.DEBUG)
    name = openbao.create_key()
    login = approle(openbao.write_policy(rules(ALL, name)))
    key = SecretBytes(b"CANARY-key-bytes")
    with vault_kms(openbao, **login) as kms:
        wrapped = wrap_one(kms, key, name)
        assert unwrap_one(kms, wrapped, name) == key
        token = requests_seen.token
        assert len(token) > 20
        with pytest.raises(KmsError):
            unwrap_one(kms, wrapped[:-4] + "AAA=", name)
        shown = [repr(kms), repr(kms.settings), str(kms.settings), caplog.text]
        with pytest.raises((TypeError, pickle.PicklingError)):
            pickle.dumps(kms)
    assert "transit/encrypt" in caplog.text, "urllib3 logs at DEBUG"
    encoded = base64.b64encode(key.reveal()).decode()
    secrets = [token, login["approle"]["secret_id"], "CANARY", encoded[:12], key.reveal().hex()]
    assert [(secret, text) for secret in secrets for text in shown if secret in text] == []


# --- the main job ---


def flights(rows: int = 3000) -> pa.Table:
    days = pa.array([place % 28 for place in range(rows)])
    return pa.table(
        {
            "day": days,
            "tailnum": [f"N{place % 500:05}" for place in range(rows)],
            "dep_time": pc.multiply(days, 7),
            "dep_delay": pc.subtract(days, 3),
            "dest": ["LAX" if place % 2 else "SFO" for place in range(rows)],
        }
    )


def configuration(server: OpenBao, token: str, **kms: object) -> dict[str, Any]:
    return {
        "version": 1,
        "kms": {"type": "vault", "url": server.url, "token": token, **kms},
        "master_keys": {"footer": "flights-footer", "pii": "flights-pii", "times": "flights-times"},
        "tables": {
            "flights": {
                "footer_key": "footer",
                "column_keys": {"pii": ["tailnum"], "times": ["dep_time", "dep_delay"]},
                "unlisted_columns": "plaintext",
            }
        },
    }


def test_flights_written_with_three_master_keys_are_read_by_pyarrow(openbao: OpenBao, tmp_path: Path) -> None:
    names = ["flights-footer", "flights-pii", "flights-times"]
    for name in names:
        openbao.create_key(name)
    writer = openbao.create_token(openbao.write_policy(rules(WRITER, *names)))
    reader = openbao.create_token(openbao.write_policy(rules(READER, *names)))
    partial_reader = openbao.create_token(openbao.write_policy(rules(READER, "flights-footer", "flights-times")))
    path = tmp_path / "flights.parquet"
    with Keytools.from_mapping(configuration(openbao, writer)) as keytools:
        keytools.write_table(flights(), path)
        assert keytools.kms is not None and keytools.kms.call_counts["wrap"] == 3
    with Keytools.from_mapping(configuration(openbao, reader)) as keytools:
        properties = keytools.decryption_properties(path)
        assert pq.read_table(path, decryption_properties=properties) == flights()
        assert keytools.kms is not None and keytools.kms.call_counts["unwrap"] == 3
    with Keytools.from_mapping(configuration(openbao, partial_reader)) as keytools:
        columns = ["day", "dep_time"]
        properties = keytools.decryption_properties(path, columns=columns)
        table = pq.read_table(path, columns=columns, decryption_properties=properties)
        assert table == flights().select(columns)


def test_files_after_a_rotation_of_master_keys(openbao: OpenBao, tmp_path: Path) -> None:
    for name in ("flights-footer", "flights-pii", "flights-times"):
        openbao.create_key(name)
    path = tmp_path / "flights.parquet"
    with Keytools.from_mapping(configuration(openbao, openbao.root_token)) as keytools:
        keytools.write_table(flights(), path)
        openbao.rotate_key("flights-pii")
        assert pq.read_table(path, decryption_properties=keytools.decryption_properties(path)) == flights()
