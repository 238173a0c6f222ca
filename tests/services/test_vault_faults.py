"""Faults between VaultKms and a server, over real sockets: class, attempts, time, and no leaks."""

from __future__ import annotations

import base64
import contextlib
import gc
import http.server
import json
import logging
import os
import pickle
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests
from openbao import OpenBao
from soak import SOAK

from parquet_keytools import Keytools
from parquet_keytools.errors import (
    KmsAccessDeniedError,
    KmsConfigurationError,
    KmsError,
    KmsResponseInvalidError,
    KmsThrottledError,
    KmsUnavailableError,
    MasterKeyNotFoundError,
    WrappedKeyInvalidError,
)
from parquet_keytools.kms.client import UnwrapRequest, WrapRequest
from parquet_keytools.kms.contract_tests import rewrap_one, unwrap_one, wrap_one
from parquet_keytools.kms.vault import VaultKms, VaultSettings
from parquet_keytools.secret_bytes import SecretBytes

KEY = SecretBytes(b"CANARY-key-bytes")
OTHER_KEY = SecretBytes(b"CANARY-other-key")
BODY_CANARY = "CANARY-in-the-body"


class Exchange:
    """One request at the proxy, and the real server's answer."""

    def __init__(
        self, handler: http.server.BaseHTTPRequestHandler, target: str, session: requests.Session
    ) -> None:
        self.handler = handler
        self.path = handler.path
        self.headers = dict(handler.headers.items())
        self.body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        self._target = target
        self._session = session

    def forward(self) -> tuple[int, bytes]:
        headers = {name: value for name, value in self.headers.items() if name.startswith("X-Vault")}
        answer = self._session.request(
            self.handler.command,
            self._target + self.path,
            data=self.body,
            headers=headers,
            allow_redirects=False,
            timeout=30,
        )
        return answer.status_code, answer.content

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.handler.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.handler.send_header(name.replace("_", "-"), value)
        self.handler.send_header("Content-Length", str(len(body)))
        self.handler.end_headers()
        self.handler.wfile.write(body)

    def hang_up(self) -> None:
        self.handler.close_connection = True
        self.handler.connection.shutdown(socket.SHUT_RDWR)


Fault = Callable[[Exchange], None]


class Proxy:
    """Forwards requests to a server; a number of those with a word in their path meet a fault."""

    def __init__(self, target: str) -> None:
        proxy = self
        self.faults: list[tuple[str, int, Fault]] = []
        self.paths: list[str] = []
        self.tokens: list[str | None] = []
        self._lock = threading.Lock()
        session = requests.Session()
        session.trust_env = False

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                exchange = Exchange(self, target, session)
                fault = proxy._fault_for(exchange)
                try:
                    if fault is not None:
                        fault(exchange)
                    else:
                        exchange.answer(*exchange.forward())
                except OSError:
                    self.close_connection = True  # the client is gone

            do_GET = do_POST = do_PUT = handle_any  # noqa: N815

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def _fault_for(self, exchange: Exchange) -> Fault | None:
        with self._lock:
            self.paths.append(exchange.path)
            self.tokens.append(exchange.headers.get("X-Vault-Token"))
            for position, (word, times, fault) in enumerate(self.faults):
                if word in exchange.path and times:
                    self.faults[position] = (word, times - 1, fault)
                    return fault
        return None

    def count(self, word: str) -> int:
        return len([path for path in self.paths if word in path])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def proxy(openbao: OpenBao) -> Iterator[Proxy]:
    proxy = Proxy(openbao.url)
    yield proxy
    proxy.close()


@pytest.fixture
def token(openbao: OpenBao) -> str:
    policy = openbao.write_policy(
        {f"transit/{action}/*": ["update", "read"] for action in ("encrypt", "decrypt", "rewrap", "keys")}
    )
    return openbao.create_token(policy)


@pytest.fixture
def kms(proxy: Proxy, token: str) -> Iterator[VaultKms]:
    with client(proxy.url, token) as kms:
        yield kms


def client(url: str, token: str, **settings: Any) -> VaultKms:
    # On a busy machine, an attempt that is not meant to be slow must not cause another one.
    limits = {"call_timeout_seconds": 15.0, "timeout_seconds": 60.0, "max_tries": 4}
    return VaultKms(VaultSettings.model_validate({"url": url, "token": token, **limits, **settings}))


def status(code: int, text: str = BODY_CANARY, **headers: str) -> Fault:
    body = json.dumps({"errors": [text]}).encode()
    return lambda exchange: exchange.answer(code, body, **headers)


def changed(change: Callable[[dict[str, Any]], object]) -> Fault:
    """Return a fault that alters the content of the real answer."""

    def fault(exchange: Exchange) -> None:
        code, body = exchange.forward()
        content = json.loads(body)
        change(content)
        exchange.answer(code, json.dumps(content).encode())

    return fault


def results(change: Callable[[list[dict[str, Any]]], object]) -> Fault:
    return changed(lambda content: change(content["data"]["batch_results"]))


def cut(exchange: Exchange) -> None:
    code, body = exchange.forward()
    exchange.handler.send_response(code)
    exchange.handler.send_header("Content-Length", str(len(body)))
    exchange.handler.end_headers()
    exchange.handler.wfile.write(body[: len(body) // 2])
    exchange.handler.wfile.flush()
    exchange.hang_up()


def dripping(exchange: Exchange) -> None:
    """Send a byte now and then, so that no single read takes long."""
    code, body = exchange.forward()
    exchange.handler.send_response(code)
    exchange.handler.send_header("Content-Length", str(len(body)))
    exchange.handler.end_headers()
    for place in range(len(body)):
        exchange.handler.wfile.write(body[place : place + 1])
        exchange.handler.wfile.flush()
        time.sleep(0.05)


def raw(body: bytes, code: int = 200) -> Fault:
    return lambda exchange: exchange.answer(code, body)


def endless(exchange: Exchange) -> None:
    exchange.handler.send_response(200)
    exchange.handler.send_header("Content-Length", str(2**40))
    exchange.handler.end_headers()
    while True:
        exchange.handler.wfile.write(b" " * 65_536)


def leaks(shown: list[str], *secrets: str) -> list[tuple[str, str]]:
    spellings = [
        "CANARY",
        *(base64.b64encode(key.reveal()).decode()[:12] for key in (KEY, OTHER_KEY)),
        *(key.reveal().hex() for key in (KEY, OTHER_KEY)),
        *secrets,
    ]
    return [(spelling, text) for spelling in spellings for text in shown if spelling in text]


def texts_of(error: KmsError) -> list[str]:
    frames = traceback.TracebackException.from_exception(error, capture_locals=False)
    return [str(error), repr(error), "".join(frames.format()), repr(vars(error)), str(pickle.dumps(error))]


# --- temporary faults ---


PASSING: dict[str, Fault] = {
    "throttled": status(429, Retry_After="0"),
    "throttled, without saying for how long": status(429),
    "internal error": status(500),
    "bad gateway": status(502, BODY_CANARY),
    "gateway with a page": raw(b"<html>CANARY-in-the-body", 502),
    "sealed": status(503, "Vault is sealed"),
    "gateway timeout": status(504),
    "not caught up": status(412),
    "disaster recovery secondary": status(472),
    "performance standby": status(473),
    "connection closed without an answer": Exchange.hang_up,
    "connection cut in the middle of the answer": cut,
    "slow": lambda exchange: time.sleep(4),
    "dripping": dripping,
    "an answer that is no JSON": raw(b"CANARY-in-the-body"),
    "an answer that is no object": raw(b"[]"),
    "an empty answer": raw(b""),
    "an answer without results": raw(b'{"data": {}}'),
    "an answer with other results": raw(b'{"data": {"batch_results": [1]}}'),
    "a result too many": results(lambda items: items.append(dict(items[0]))),
    "a result too few": results(lambda items: items.clear()),
    "a reason that is not known": status(418),
    "an answer without end": endless,
}


SOME = ("throttled", "sealed", "connection cut in the middle of the answer", "slow", "a result too few")


@pytest.mark.parametrize(
    ("operation", "what"),
    [*(("unwrap", what) for what in PASSING), *((other, what) for other in ("wrap", "rewrap") for what in SOME)],
)
def test_a_fault_that_passes_costs_a_try(
    proxy: Proxy, openbao: OpenBao, token: str, what: str, operation: str
) -> None:
    fault = PASSING[what]
    name = openbao.create_key()
    path = {"wrap": "encrypt", "unwrap": "decrypt", "rewrap": "rewrap"}[operation]
    with client(
        proxy.url, token, **({"call_timeout_seconds": 2.0} if what in ("slow", "dripping") else {})
    ) as kms:
        wrapped = wrap_one(kms, KEY, name)
        before = proxy.count(path)
        proxy.faults.append((path, 1, fault))
        if operation == "wrap":
            assert unwrap_one(kms, wrap_one(kms, KEY, name), name) == KEY
        elif operation == "unwrap":
            assert unwrap_one(kms, wrapped, name) == KEY
        else:
            assert unwrap_one(kms, rewrap_one(kms, wrapped, name), name) == KEY
    assert proxy.count(path) == before + 2


# --- permanent faults ---


@pytest.mark.parametrize(
    ("fault", "kind", "tries"),
    [
        (status(429), KmsThrottledError, 4),
        (status(503, "Vault is sealed"), KmsUnavailableError, 4),
        (status(473), KmsUnavailableError, 4),
        (status(500), KmsUnavailableError, 4),
        (Exchange.hang_up, KmsUnavailableError, 4),
        (cut, KmsUnavailableError, 4),
        (raw(b"CANARY-in-the-body"), KmsResponseInvalidError, 3),
        (results(lambda items: items.append(items[0])), KmsResponseInvalidError, 3),
        (results(lambda items: items[0].update(plaintext="CANARY")), KmsResponseInvalidError, 3),
        (results(lambda items: items[0].update(plaintext="QUFB")), KmsResponseInvalidError, 3),
        (results(lambda items: items[0].update(plaintext=7)), KmsResponseInvalidError, 3),
        (results(lambda items: items[0].update(plaintext="", error=BODY_CANARY)), KmsResponseInvalidError, 1),
        (status(400), KmsConfigurationError, 1),
        (status(400, "encryption key not found"), MasterKeyNotFoundError, 1),
        (status(401), KmsAccessDeniedError, 1),
        (status(403), KmsAccessDeniedError, 1),
        (status(404, "no handler for route CANARY"), KmsConfigurationError, 1),
        (status(405, "unsupported operation"), KmsConfigurationError, 1),
    ],
)
def test_a_fault_that_stays_ends_in_its_class(
    kms: VaultKms,
    proxy: Proxy,
    openbao: OpenBao,
    token: str,
    caplog: pytest.LogCaptureFixture,
    fault: Fault,
    kind: type[KmsError],
    tries: int,
) -> None:
    caplog.set_level(logging.DEBUG)
    name = openbao.create_key()
    wrapped = wrap_one(kms, KEY, name)
    proxy.faults.append(("decrypt", -1, fault))
    started = time.monotonic()
    with pytest.raises(KmsError) as caught:
        unwrap_one(kms, wrapped, name)
    assert time.monotonic() - started < kms.limits.timeout_seconds
    error = caught.value
    assert (type(error), error.tries, proxy.count("decrypt")) == (kind, tries, tries)
    assert (error.backend, error.operation, error.master_key_id) == ("vault", "unwrap", name)
    assert leaks([*texts_of(error), caplog.text], token) == []


@pytest.mark.parametrize("fault", [lambda exchange: time.sleep(20), dripping], ids=["silent", "dripping"])
def test_a_slow_server_ends_within_the_deadline(proxy: Proxy, openbao: OpenBao, token: str, fault: Fault) -> None:
    name = openbao.create_key()
    with client(proxy.url, token, call_timeout_seconds=0.4, timeout_seconds=4, max_tries=100) as kms:
        wrapped = wrap_one(kms, KEY, name)
        proxy.faults.append(("decrypt", -1, fault))
        started = time.monotonic()
        with pytest.raises(KmsUnavailableError) as caught:
            unwrap_one(kms, wrapped, name)
        # A hundred attempts would take 40 seconds.
        assert 1.0 < time.monotonic() - started < 30
        assert caught.value.tries >= 3
        assert "in time" in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda item: item.update(ciphertext=item["ciphertext"].replace("vault:v1:", "vault:v2:")),
        lambda item: item.update(key_version=2),
        lambda item: item.update(ciphertext="CANARY"),
        lambda item: item.update(ciphertext="vault:v1:" + base64.b64encode(KEY.reveal()).decode()),
        lambda item: item.update(ciphertext="vault:v1:" + base64.b64encode(KEY.reveal() + bytes(40)).decode()),
        lambda item: item.update(ciphertext="vault:v1:QUJD"),
        lambda item: item.update(ciphertext=None),
        lambda item: item.pop("ciphertext"),
    ],
)
def test_a_wrapped_key_that_is_none_is_refused(
    kms: VaultKms, proxy: Proxy, openbao: OpenBao, change: Callable[[dict[str, Any]], object]
) -> None:
    name = openbao.create_key()
    wrap_one(kms, KEY, name)
    proxy.faults.append(("encrypt", -1, results(lambda items: change(items[0]))))
    before = proxy.count("encrypt")
    with pytest.raises(KmsResponseInvalidError) as caught:
        wrap_one(kms, KEY, name)
    assert proxy.count("encrypt") == before + 3
    assert leaks(texts_of(caught.value)) == []


def test_what_is_said_of_another_master_key_is_refused(kms: VaultKms, proxy: Proxy, openbao: OpenBao) -> None:
    name = openbao.create_key()
    for change in (
        lambda data: data.update(name="another"),
        lambda data: data.update(latest_version="1"),
        lambda data: data.update(min_decryption_version=7),
        lambda data: data.pop("type"),
    ):
        proxy.faults[:] = [("keys/", -1, changed(lambda content, change=change: change(content["data"])))]
        for call in (lambda: wrap_one(kms, KEY, name), lambda: kms.describe(name)):
            with pytest.raises(KmsResponseInvalidError):
                call()


def test_partial_failures_show_no_key(
    kms: VaultKms, proxy: Proxy, openbao: OpenBao, token: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The server returns the keys of the successful items, whatever the status of the whole."""
    caplog.set_level(logging.DEBUG)
    name = openbao.create_key()
    good = [wrap_one(kms, key, name) for key in (KEY, OTHER_KEY)]
    forged = good[0][:-8] + ("AAAAAAA=" if good[0].endswith("=") else "AAAAAAAA")

    def as_400(exchange: Exchange) -> None:
        code, body = exchange.forward()
        assert code == 200 and b'"error"' in body
        exchange.answer(400, body)

    for fault in (None, as_400):
        proxy.faults[:] = [("decrypt", 1, fault)] if fault else []
        first, bad, second = kms.unwrap_many([UnwrapRequest(text, name) for text in (good[0], forged, good[1])])
        assert (first, second) == (KEY, OTHER_KEY)
        assert isinstance(bad, WrappedKeyInvalidError)
        assert leaks([*texts_of(bad), caplog.text], token) == []
    for refused in (status(400, base64.b64encode(KEY.reveal()).decode()), status(500, token)):
        proxy.faults[:] = [("decrypt", -1, refused)]
        for outcome in kms.unwrap_many([UnwrapRequest(text, name) for text in (good[0], forged)]):
            assert isinstance(outcome, KmsError)
            assert leaks([*texts_of(outcome), caplog.text], token) == []


# --- redirects ---


def redirect(status: int, location: str) -> Fault:
    return lambda exchange: exchange.answer(status, b"{}", Location=location)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(kms: VaultKms, proxy: Proxy, openbao: OpenBao, status: int) -> None:
    """Neither to another host nor to the same one: token and keys would go along."""
    name = openbao.create_key()
    wrapped = wrap_one(kms, KEY, name)
    stranger = Proxy(openbao.url)
    try:
        for location in (stranger.url, proxy.url, "http://[", "http://\x07CANARY/", ""):
            fault = redirect(status, location)
            proxy.faults[:] = [("decrypt", -1, fault)]
            before = proxy.count("decrypt")
            with pytest.raises(KmsConfigurationError, match="it redirects to another address") as caught:
                unwrap_one(kms, wrapped, name)
            assert leaks(texts_of(caught.value)) == []
            assert stranger.paths == [] and proxy.count("decrypt") == before + 1
    finally:
        stranger.close()


# --- tokens under faults ---


def test_a_renewal_that_fails_does_not_stop_work(openbao: OpenBao, proxy: Proxy) -> None:
    name = openbao.create_key()
    policy = openbao.write_policy({"transit/*": ["read", "update"]})
    # It is renewed from 2/3 of its life: this leaves more than a second for the third attempt on a busy machine.
    short = openbao.create_token(policy, ttl="5s")
    with client(proxy.url, short) as kms:
        wrap_one(kms, KEY, name)
        proxy.faults.append(("renew-self", 2, status(503)))
        end = time.monotonic() + 5.5
        while time.monotonic() < end:
            wrap_one(kms, KEY, name)
            time.sleep(0.02)
        assert proxy.count("renew-self") >= 3


def test_a_login_waits_for_the_server(openbao: OpenBao, proxy: Proxy) -> None:
    name = openbao.create_key()
    mount = openbao.enable_auth("approle")
    policy = openbao.write_policy({"transit/*": ["read", "update"]})
    role_id, secret_id = openbao.create_approle(mount, policy)
    settings = {"url": proxy.url, "approle": {"role_id": role_id, "secret_id": secret_id, "mount": mount}}
    proxy.faults += [("login", 2, status(503)), ("login", 1, cut), ("lookup-self", 1, raw(b"CANARY"))]
    with VaultKms(VaultSettings.model_validate(settings)) as kms:
        assert unwrap_one(kms, wrap_one(kms, KEY, name), name) == KEY
        assert proxy.count("login") == 4
        assert [token for path, token in zip(proxy.paths, proxy.tokens, strict=True) if "login" in path] == [
            None
        ] * 4


# --- throttled, sealed, killed ---


def test_a_server_that_throttles_by_itself(openbao: OpenBao, token: str) -> None:
    name = openbao.create_key()
    quota = {"path": "transit", "rate": 20, "interval": "1s"}
    openbao.ask("POST", "sys/quotas/rate-limit/test", quota)
    try:
        with (
            client(openbao.url, token, timeout_seconds=30, max_tries=100) as kms,
            ThreadPoolExecutor(16) as threads,
        ):
            wrapped = list(threads.map(lambda _: wrap_one(kms, KEY, name), range(40)))
        assert len(set(wrapped)) == 40
    finally:
        openbao.ask("DELETE", "sys/quotas/rate-limit/test")


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[OpenBao]:
    """A server for a test that damages it."""
    folder = tmp_path / "openbao"
    folder.mkdir()
    server = OpenBao(folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def test_a_sealed_server_is_waited_for(own_server: OpenBao) -> None:
    name = own_server.create_key()
    with client(own_server.url, own_server.root_token, timeout_seconds=20, max_tries=100) as kms:
        wrapped = wrap_one(kms, KEY, name)
        own_server.seal()
        unsealing = threading.Timer(0.7, own_server.unseal)
        unsealing.start()
        assert unwrap_one(kms, wrapped, name) == KEY
        unsealing.join()
        own_server.seal()
    with (
        client(own_server.url, own_server.root_token) as kms,
        pytest.raises(KmsUnavailableError, match="sealed"),
    ):
        unwrap_one(kms, wrapped, name)


def test_killed_and_restarted_during_a_run_of_writes_nothing_is_lost(own_server: OpenBao, tmp_path: Path) -> None:
    for name in ("footer", "pii"):
        own_server.create_key(name)
    configuration = {
        "version": 1,
        "kms": {"type": "vault", "url": own_server.url, "token": own_server.root_token, "max_tries": 100},
        "tables": {
            "t": {
                "footer_key": "footer",
                "column_keys": {"pii": ["name"]},
                "unlisted_columns": "plaintext",
                "cache_lifetime_seconds": 0,
            },
        },
    }
    outage: list[float] = []

    def restart() -> None:
        time.sleep(0.4)
        own_server.kill()
        started = time.monotonic()
        time.sleep(1.0)
        own_server.start()
        outage.append(time.monotonic() - started)

    restarting = threading.Thread(target=restart)
    tables = {}
    with Keytools.from_mapping(configuration) as keytools:
        restarting.start()
        count = 0
        while restarting.is_alive() or count < 20:
            path = tmp_path / f"{count}.parquet"
            tables[path] = pa.table({"name": [f"name {count}"] * 5, "number": range(5)})
            keytools.write_table(tables[path], path)
            count += 1
        restarting.join()
        assert outage and outage[0] >= 1
        keytools.clear_caches()
        for path, table in tables.items():
            assert pq.read_table(path, decryption_properties=keytools.decryption_properties(path)) == table
    assert {path for path in tmp_path.iterdir() if path.is_file()} == set(tables)


# --- many ---


def open_sockets(server: OpenBao) -> int:
    """Return how many connections this process has to a server; other tests connect to other servers."""
    ends = set()
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[2].partition(":")[2], 16) == server.port:
            ends.add(f"socket:[{fields[9]}]")
    count = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            count += str(descriptor.readlink()) in ends
    return count


def resident_megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_thousands_of_wraps_and_unwraps_from_32_threads(openbao: OpenBao, token: str) -> None:
    names = [openbao.create_key() for _ in range(3)]
    rounds = 10 if SOAK else 4
    before = open_sockets(openbao)
    settings = {"url": openbao.url, "token": token}
    with VaultKms(VaultSettings.model_validate(settings)) as kms:

        def single(number: int) -> None:
            name = names[number % 3]
            key = SecretBytes.random(256)
            assert unwrap_one(kms, wrap_one(kms, key, name), name) == key

        def many(number: int) -> None:
            name = names[number % 3]
            keys = [SecretBytes.random(128) for _ in range(25)]
            wrapped = kms.wrap_many([WrapRequest(key, name) for key in keys])
            assert kms.unwrap_many([UnwrapRequest(str(text), name) for text in wrapped]) == keys

        with ThreadPoolExecutor(32) as threads:
            list(threads.map(single, range(20 * rounds)))
            gc.collect()
            warm = resident_megabytes()
            list(threads.map(single, range(30 * rounds)))
            list(threads.map(many, range(4 * rounds)))
            assert 0 < open_sockets(openbao) - before <= 2 * kms.limits.max_concurrent_calls
            gc.collect()
            grown = resident_megabytes() - warm
        counts = kms.call_counts
    assert counts["wrap"] + counts["unwrap"] == 300 * rounds
    assert grown < 40
    gc.collect()
    assert open_sockets(openbao) <= before + 2
