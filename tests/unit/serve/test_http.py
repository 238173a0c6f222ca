"""The server over HTTP: ranges, conditions, refusals, and files that fail while they are sent."""

from __future__ import annotations

import contextlib
import errno
import http.client
import logging
import os
import re
import socket
import ssl
import threading
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from unit.serve.serving import ask, asked, connected, memory_files, said, served, tree_of

from parquet_keytools.errors import (
    ConfigurationError,
    DecryptionError,
    KmsAccessDeniedError,
    KmsUnavailableError,
    ParquetFormatError,
)
from parquet_keytools.serve import view_server
from parquet_keytools.serve.requests_and_answers import LOGGER_NAME
from parquet_keytools.serve.served_tree import ServedTree
from parquet_keytools.serve.view_server import ViewServer

CONTENT = os.urandom(3_000_000)
FILES = {"2013/a.parquet": CONTENT, "empty": b"", "2013/with space & ü.parquet": b"odd"}


def logged(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Return the contents of the access log; threads of other tests in this process may log, too."""
    return [record.access for record in caplog.records if record.name == LOGGER_NAME]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("wanted", "status", "start", "end"),
    [
        ("bytes=0-0", 206, 0, 1),
        ("bytes=5-99", 206, 5, 100),
        ("Bytes = 5-99", 206, 5, 100),
        ("bytes=2999999-", 206, 2_999_999, 3_000_000),
        ("bytes=2999990-99999999999999999999999999", 206, 2_999_990, 3_000_000),
        ("bytes=-8", 206, 2_999_992, 3_000_000),
        ("bytes=-9999999999", 206, 0, 3_000_000),
        # Invalid ranges, and several: the whole file.
        ("bytes=9-5", 200, 0, 3_000_000),
        ("bytes=0-1,5-6", 200, 0, 3_000_000),
        ("bytes=-", 200, 0, 3_000_000),
        ("bytes=a-b", 200, 0, 3_000_000),
        ("bytes=١-٢", 200, 0, 3_000_000),
        ("pages=1-2", 200, 0, 3_000_000),
    ],
)
def test_ranges(wanted: str, status: int, start: int, end: int) -> None:
    with served(FILES) as server, contextlib.closing(connected(server)) as connection:
        for method in ("GET", "HEAD"):
            connection.putrequest(method, "/" + server.url.split("/", 3)[3] + "2013/a.parquet")
            connection.putheader("Range", wanted.encode())
            connection.endheaders()
            response = connection.getresponse()
            body = response.read()
            assert response.status == status
            assert response.headers["Content-Length"] == str(end - start)
            expected = f"bytes {start}-{end - 1}/3000000" if status == 206 else None
            assert response.headers["Content-Range"] == expected
            assert body == (CONTENT[start:end] if method == "GET" else b"")


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ("2013/a.parquet", "bytes=3000000-"),
        ("2013/a.parquet", "bytes=-0"),
        ("empty", "bytes=0-"),
        ("empty", "bytes=-1"),
    ],
)
def test_ranges_that_a_file_does_not_have(key: str, wanted: str) -> None:
    with served(FILES) as server:
        status, headers, _ = ask(server, key, headers={"Range": wanted})
        assert (status, headers["Content-Range"]) == (416, f"bytes */{len(FILES[key])}")


def test_conditions() -> None:
    with served(FILES) as server:
        key = "2013/a.parquet"
        _, headers, _ = ask(server, key, "HEAD")
        etag, modified = headers["ETag"], headers["Last-Modified"]
        assert etag.startswith('"') and len(etag) > 20
        for status, conditions in [
            (200, {"If-Match": etag}),
            (200, {"If-Match": f'"x", {etag}'}),
            (200, {"If-Match": "*"}),
            (412, {"If-Match": '"x"'}),
            (412, {"If-Match": f"W/{etag}"}),
            (200, {"If-None-Match": etag}),
            (206, {"Range": "bytes=0-9", "If-Match": etag}),
            (412, {"Range": "bytes=0-9", "If-Match": '"x"'}),
            (206, {"Range": "bytes=0-9", "If-Range": etag}),
            (200, {"Range": "bytes=0-9", "If-Range": f"W/{etag}"}),
            (200, {"Range": "bytes=0-9", "If-Range": '"x"'}),
            (200, {"Range": "bytes=0-9", "If-Range": modified}),
        ]:
            found, headers, body = ask(server, key, headers=conditions)
            assert (found, headers["ETag"]) == (status, etag), conditions
            assert body == {200: CONTENT, 206: CONTENT[:10]}.get(status, body)


def test_two_runs_have_different_etags_and_secrets() -> None:
    with served(FILES) as first, served(FILES) as second:
        assert ask(first, "empty")[1]["ETag"] != ask(second, "empty")[1]["ETag"]
        assert first.url.split("/")[3] != second.url.split("/")[3]


def test_a_folder_has_links_that_lead_to_its_files() -> None:
    with served(FILES) as server:
        assert re.findall('href="(.*?)"', ask(server, "")[2].decode()) == ["2013/", "empty"]
        links = re.findall('href="(.*?)"', ask(server, "2013/")[2].decode())
        assert [ask(server, "2013/" + link)[2] for link in links] == [CONTENT, b"odd"]


ODD_NAMES = [
    "a:b.parquet",
    "c:d/http:x/f.parquet",
    "http-logs/https.parquet",
    "https.parquet",
    " q?u#x&'.parquet",
    'quo"te<b>.parquet',
    "per%41cent%/%2e%2e.parquet",
    "ünï☃/plus+.parquet",
    "semi;=[1]*{}.parquet",
    "back\\slash.parquet",
]


def test_links_are_names_that_clients_join_in_two_ways() -> None:
    with served({name: name.encode() for name in ODD_NAMES}) as server:
        found, folders = {}, [server.url]
        while folders:
            folder = folders.pop()
            with urllib.request.urlopen(folder) as answer:
                links = re.findall('href="(.*?)"', answer.read().decode())
            for link in links:
                # Browsers resolve a reference; fsspec joins strings, and treats "http..." as an address.
                assert not link.startswith("http")
                address = urljoin(folder, link)
                assert address == folder + link
                if address.endswith("/"):
                    folders.append(address)
                    continue
                with urllib.request.urlopen(address) as answer:
                    found[unquote(address.removeprefix(server.url))] = answer.read().decode()
    assert found == {name: name for name in ODD_NAMES}


@pytest.mark.parametrize("folder", ["2013", "c:d", "per%2541", "%C3%BC"])
def test_a_folder_without_its_slash_is_redirected(folder: str) -> None:
    files = {f"{unquote(folder)}/a:b": CONTENT}
    with served(files, with_s3=True) as server:
        for method in ("GET", "HEAD"):
            status, headers, body = ask(server, f"{folder}?x=1&y=%2F", method)
            assert (status, body) == (301, b"")
            assert headers["Location"] == f"{urlsplit(server.url).path}{folder}/?x=1&y=%2F"
        with urllib.request.urlopen(f"{server.url}{folder}") as answer:
            assert answer.url == f"{server.url}{folder}/"
            assert re.findall('href="(.*?)"', answer.read().decode()) == ["a%3Ab"]
        with urllib.request.urlopen(server.url.rstrip("/")) as answer:
            assert answer.url == server.url
        with pytest.raises(urllib.error.HTTPError, match=r"40[34]"):
            urllib.request.urlopen(f"{server.endpoint}/{folder}")


@pytest.mark.parametrize(
    "key",
    [
        "2013/b.parquet",
        "2014",
        "../root/2013/a.parquet",
        "2013/../2013/a.parquet",
        "2013/%2e%2e/2013/a.parquet",
        "2013%2f..%2f2013%2fa.parquet",
        "%252e%252e/a",
        "./2013/a.parquet",
        "2013//a.parquet",
        "/2013/a.parquet",
        "2013/a.parquet%00",
        "2013/a.parquet/",
        "2013/%0d%0aX:%20y",
        "2013/..%5c..%5ca",
        "a" * 2000,
    ],
)
def test_paths_that_are_no_files(key: str) -> None:
    with served(FILES) as server:
        status, headers, body = ask(server, key)
        assert (status, body) == (404, b"There is no such file.\n")
        assert "X" not in headers


def test_links_out_of_the_folder_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "folder outside"
    for place in (folder / "inner", outside):
        place.mkdir(parents=True)
        (place / "part-0").write_bytes(place.name.encode())
    (folder / "link").symlink_to(outside / "part-0")
    (folder / "links").symlink_to(outside)
    (folder / "part-1").symlink_to(folder / "inner" / "part-0")
    (folder / "loop").symlink_to(folder)
    (folder / "inner" / "above").symlink_to(folder)
    tree = ServedTree(DirFileSystem(str(folder), fsspec.filesystem("file")), folder=folder)
    with ViewServer(tree) as server:
        assert [ask(server, key)[0] for key in ("link", "links/part-0", "links/")] == [404] * 3
        assert ask(server, "part-1")[2] == b"inner"
        assert re.findall('href="(.*?)"', ask(server, "")[2].decode()) == ["inner/", "part-1"]
        assert re.findall('href="(.*?)"', ask(server, "inner/")[2].decode()) == ["part-0"]
    assert list(tree.keys("")) == ["inner/part-0", "part-1"]
    assert "'link' is not served" in caplog.text


@pytest.mark.parametrize("with_s3", [False, True])
def test_no_part_of_a_secret_is_logged(caplog: pytest.LogCaptureFixture, *, with_s3: bool) -> None:
    with caplog.at_level(logging.INFO), served(FILES, with_s3=with_s3) as server:
        token = urlsplit(server.url).path.strip("/")
        secrets = [token, *([server.key_pair.secret.reveal().decode()] if server.key_pair else [])]
        for secret in secrets:
            encoded = "".join(f"%{byte:02X}" for byte in secret.encode())
            for text in (
                secret,
                f"{server.endpoint}/{secret}/2013/a.parquet",
                secret[:12],
                secret[-8:],
                f"x{secret[5:20]}y",
                secret.lower(),
                encoded,
                quote(encoded),
                quote(quote(encoded)),
                f"{secret[:10]}/{secret[10:]}",
            ):
                for path in (text, f"2013/{text}/", f"2013/a.parquet?{text}={text}", f"2013/a.parquet/{text}"):
                    ask(server, path, headers={"Referer": text, "User-Agent": text})
                    said(server, f"GET /view/{path} HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n\r\n".encode())
            said(server, f"{secret} PATH HTTP/1.1\r\nHost: HOST\r\n\r\n".encode())
            said(server, f"GET PATH HTTP/1.1\r\nHost: {secret}\r\n\r\n".encode())
        ask(server, "2013/other.parquet")
    accesses = logged(caplog)
    assert accesses[-1]["key"] == "2013/other.parquet"
    written = (repr(accesses) + caplog.text).casefold()
    for _ in range(5):
        written += unquote(written)
    assert [
        secret
        for secret in secrets
        for start in range(len(secret) - 7)
        if secret[start : start + 8].casefold() in written
    ] == []


def test_one_file_alone_is_served() -> None:
    filesystem = memory_files({"a": b"1", "b": b"2"})
    with ViewServer(tree_of(filesystem, only="a")) as server:
        assert (ask(server, "a")[0], ask(server, "b")[0]) == (200, 404)
        assert re.findall('href="(.*?)"', ask(server, "")[2].decode()) == ["a"]


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /empty HTTP/1.1\r\nHost: HOST\r\n\r\n", 404),
        (b"GET /wrong-secret/empty HTTP/1.1\r\nHost: HOST\r\n\r\n", 404),
        (b"GET PATH HTTP/1.1\r\nHost: rebound.example\r\n\r\n", 421),
        (b"GET PATH HTTP/1.1\r\nHost: rebound.example:80@HOST\r\n\r\n", 421),
        (b"GET PATH HTTP/1.1\r\n\r\n", 421),
        (b"GET PATH HTTP/1.1\r\nHost: HOST\r\nHost: HOST\r\n\r\n", 400),
        (b"GET PATHempty HTTP/1.1\r\nHost: HOST\r\nRange: bytes=0-\r\nRange: bytes=1-\r\n\r\n", 400),
        (b"GET PATH HTTP/1.1\r\nHost: HOST\r\nContent-Length: 5\r\n\r\nhello", 400),
        (b"GET PATH HTTP/1.1\r\nHost: HOST\r\nContent-Length: 0\r\nContent-Length: 4\r\n\r\nGET ", 400),
        (b"GET PATH HTTP/1.1\r\nHost: HOST\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"GET PATH HTTP/1.1\r\nHost: HOST\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n", 400),
        (b"GET http://HOSTPATH HTTP/1.1\r\nHost: HOST\r\n\r\n", 400),
        (b"GET PATH%ff HTTP/1.1\r\nHost: HOST\r\n\r\n", 400),
        (b"GET PATH\xc3\xbc HTTP/1.1\r\nHost: HOST\r\n\r\n", 400),
        (b"GET PATH HTTP/1.7\r\nHost: HOST\r\n\r\n", 505),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: HOST\r\n\r\n", 414),
        (b"GET PATH HTTP/1.1\r\nHost: HOST\r\n" + (b"X: " + b"y" * 1000 + b"\r\n") * 90 + b"\r\n", 431),
        # One parser reads this as one request, another as two.
        (b"GET PATH HTTP/1.1\r\nHost: HOST\r\nContent-Length : 5\r\n\r\n", 400),
        (b"GET PATH HTTP/1.1\r\nHost: HOST\r\nX: a\r\n folded: b\r\n\r\n", 400),
        (b"GET PATH HTTP/1.1\r\nHost: HOST\r\nX: a\rTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET PATH HTTP/1.1\r\nHost: HOST\r\nX: a\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET PATH HTTP/1.1\r\nHost: HOST\r\nX: a\0b\r\n\r\n", 400),
        (b"GET PATH HTTP/1.1\r\nHost: HOST\r\nno colon\r\n\r\n", 400),
        (b"GET\x0bPATH\x0bHTTP/1.1\r\nHost: HOST\r\n\r\n", 400),
        (b"GET  PATH HTTP/1.1\r\nHost: HOST\r\n\r\n", 400),
        (b"GET PATH HTTP/1.1 \r\nHost: HOST\r\n\r\n", 400),
        (b"GET PATH HTTP/one\r\nHost: HOST\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
        (b"GET PATH HTTP/1.1\r\nHost: HOST\r\nTransfer-Encoding: identity\r\n\r\n", 400),
        (b"GET PATH HTTP/1.1\r\nHost: HOST\r\nContent-Length: +0\r\n\r\n", 400),
        *(
            (method + b" PATHempty HTTP/1.1\r\nHost: HOST\r\nContent-Length: 1\r\n\r\nx", 405)
            for method in (b"PUT", b"POST", b"DELETE", b"PATCH", b"OPTIONS", b"TRACE", b"CONNECT", b"get")
        ),
    ],
)
def test_requests_that_are_refused(request_bytes: bytes, status: int, caplog: pytest.LogCaptureFixture) -> None:
    with served(FILES) as server:
        # Not every refusal closes the connection.
        answer = said(server, request_bytes.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert answer.count(b"HTTP/1.1") == 1
    (access,) = logged(caplog)
    assert access["status"] == status and access["reason"].encode() in answer


def test_what_follows_a_request_is_another_one() -> None:
    request = b"GET PATHempty HTTP/1.1\r\nHost: HOST\r\n"
    with served(FILES) as server:
        answer = said(server, (request + b"\r\n\r\n") * 2 + request + b"Connection: close\r\n\r\n" + request)
        assert answer.count(b"HTTP/1.1 200 ") == answer.count(b"HTTP/1.1") == 3
        smuggled = request.replace(b"empty", b"2013/a.parquet") + b"\r\n"
        for length in (
            b"Content-Length: 0\r\nTransfer-Encoding: chunked",
            b"Content-Length: 9\r\nContent-Length: 0",
        ):
            answer = said(server, request + length + b"\r\n\r\n0\r\n\r\n" + smuggled)
            assert (answer[:13], answer.count(b"HTTP/1.1")) == (b"HTTP/1.1 400 ", 1)


def test_http_0_9_gets_no_file() -> None:
    with served({"a": b"the content"}) as server:
        assert b"content" not in said(server, b"GET PATHa\r\n\r\n")


def test_a_head_that_does_not_come_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with served(FILES) as server, socket.create_connection(("127.0.0.1", port_of(server)), timeout=30) as half:
        half.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1")
        half.shutdown(socket.SHUT_WR)
        assert half.recv(13) == b"HTTP/1.1 400 "
        monkeypatch.setattr(view_server, "HEAD_SECONDS", 0.2)
        assert said(server, b"") == b""
        # However long the first byte takes on a busy machine.
        begin, seconds = view_server.HeadReader.begin, iter((30.0, 30.0, 0.2))
        monkeypatch.setattr(view_server.HeadReader, "begin", lambda reader, _: begin(reader, next(seconds)))
        assert said(server, b"GET PATH HTTP/1.1\r\nHost").startswith(b"HTTP/1.1 408 ")
    assert [access["status"] for access in logged(caplog)] == [400, 408]


@pytest.mark.parametrize(
    "error", [ConnectionResetError(104, "s3cr3t"), TimeoutError("s3cr3t"), OSError(5, "s3cr3t")]
)
def test_storage_that_fails_is_no_client_that_is_gone(error: OSError, caplog: pytest.LogCaptureFixture) -> None:
    filesystem = memory_files(FILES)
    with served(filesystem) as server:
        for method in ("open", "info", "ls"):

            def fail(*arguments: object, **options: object) -> None:
                raise error

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(filesystem, method, fail)
                status, _, body = ask(server, "" if method == "ls" else "empty")
            assert (status, body) == (502, f"The storage failed: {type(error).__name__}.\n".encode())
        assert ask(server, "empty")[0] == 200
    assert [access["outcome"] for access in logged(caplog)] == [type(error).__name__] * 3
    assert "s3cr3t" not in caplog.text


@pytest.mark.parametrize(
    ("address", "code"), [("127.0.0.1", None), ("192.0.2.77", None), ("127.0.0.1", errno.EACCES)]
)
def test_an_address_that_is_not_free(address: str, code: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, "no")

    with served(FILES) as server:
        port = port_of(server)
        if code is not None:
            monkeypatch.setattr(view_server.socketserver.TCPServer, "server_bind", fail)
        with pytest.raises(ConfigurationError) as caught:
            ViewServer(tree_of(memory_files(FILES)), address=address, port=port)
        assert str(caught.value).startswith(f"the server cannot listen on {address}:{port}: ")
        assert "Choose another --port" in str(caught.value)


def test_every_byte_of_a_footer_is_part_of_the_etag() -> None:
    footer = bytes(3_000_000)
    end = len(footer).to_bytes(4, "little") + b"PAR1"
    filesystem = memory_files({"a": b"PAR1" + footer + end})
    # As for a file whose permissions changed: another file in every visible respect.
    filesystem.ukey = lambda path: "same"
    with served(filesystem) as server:
        etags = [ask(server, "a", "HEAD")[1]["ETag"]]
        for place in (0, 1_500_000, 2_999_999):
            changed = bytearray(footer)
            changed[place] = 1
            filesystem.pipe_file("/root/a", b"PAR1" + bytes(changed) + end)
            etags.append(ask(server, "a", "HEAD")[1]["ETag"])
        assert len(set(etags)) == 4


def test_a_client_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_server, "SEND_SECONDS", 0.2)
    ended = threading.Event()
    monkeypatch.setattr(view_server, "write_access", lambda *_: ended.set())
    with served({"large": bytes(50_000_000)}) as server, contextlib.closing(connected(server)) as connection:
        connection.request("GET", "/" + server.url.split("/", 3)[3] + "large")
        assert ended.wait(30)
        with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
            connection.getresponse().read()


def test_connections_are_bounded_and_others_refused_at_once() -> None:
    with served(FILES, max_connections=2) as server, contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(contextlib.closing(connected(server))) for _ in range(2))
        assert [asked(each, server, "empty")[0] for each in (first, second)] == [200, 200]
        assert said(server, b"").startswith(b"HTTP/1.1 503 ")
        assert asked(first, server, "empty")[0] == 200


def test_strangers_do_not_lock_out_who_has_the_secret() -> None:
    with served(FILES, max_connections=3) as server, contextlib.ExitStack() as stack:
        ours = stack.enter_context(contextlib.closing(connected(server)))
        assert asked(ours, server, "empty")[0] == 200
        place = urlsplit(server.url)
        strangers = [
            stack.enter_context(socket.create_connection((place.hostname, place.port), timeout=30))
            for _ in range(5)
        ]
        assert ask(server, "empty")[0] == 200
        assert [stranger.recv(1) for stranger in strangers[:4]] == [b""] * 4
        strangers_request = b"GET /no-secret/x HTTP/1.1\r\nHost: HOST\r\n\r\n".replace(
            b"HOST", place.netloc.encode()
        )
        stranger = stack.enter_context(socket.create_connection((place.hostname, place.port), timeout=30))
        stranger.sendall(strangers_request)
        assert stranger.recv(1) == b"H"
        assert ask(server, "empty")[0] == 200
        assert asked(ours, server, "empty")[0] == 200


def test_the_end_waits_once_for_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def join(thread: threading.Thread, timeout: float | None = None) -> None:
        nonlocal now
        # Other threads of this process wait for theirs.
        if threading.current_thread() is not this_thread:
            return thread_join(thread, timeout)
        now += timeout or 0.0
        return None

    this_thread, thread_join = threading.current_thread(), threading.Thread.join
    with contextlib.ExitStack() as stack:
        with served(FILES) as server:
            for _ in range(3):
                assert asked(stack.enter_context(contextlib.closing(connected(server))), server, "empty")[0] == 200
            monkeypatch.setattr(view_server, "time", SimpleNamespace(monotonic=lambda: now))
            monkeypatch.setattr(threading.Thread, "join", join)
        assert now == view_server.END_SECONDS
        monkeypatch.undo()


def test_the_end_ends_all_connections() -> None:
    # Servers of other tests in this process may still have theirs.
    before = set(threading.enumerate())
    with served(FILES) as server:
        connection = connected(server)
        assert asked(connection, server, "empty")[0] == 200
        threads = [
            thread
            for thread in threading.enumerate()
            if "process_request_thread" in thread.name and thread not in before
        ]
    for thread in threads:
        thread.join(60)
    assert threads and not any(thread.is_alive() for thread in threads)
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)):
        connection.request("GET", "/")
        connection.getresponse()
    connection.close()
    with pytest.raises(ConnectionRefusedError):
        ask(server, "empty")


class FailingFile:
    """A file with one unreadable byte."""

    def __init__(self, stream: Any, place: int, error: Exception) -> None:
        self._stream, self._place, self._error = stream, place, error

    def __enter__(self) -> FailingFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def seek(self, place: int, whence: int = 0) -> int:
        return self._stream.seek(place, whence)

    def read(self, length: int) -> bytes:
        if self._stream.tell() <= self._place < self._stream.tell() + length:
            raise self._error
        return self._stream.read(length)


def failing(place: int, error: Exception) -> Any:
    filesystem = memory_files(FILES)
    inner = filesystem.open
    filesystem.open = lambda *arguments, **options: FailingFile(inner(*arguments, **options), place, error)
    return filesystem


@pytest.mark.parametrize(
    "error",
    [
        DecryptionError("a page is altered"),
        KmsUnavailableError("gone", backend="x", operation="unwrap", master_key_id="k"),
        OSError(5, "input/output error"),
        RuntimeError("not foreseen"),
    ],
)
def test_what_fails_in_the_middle_ends_the_connection(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER_NAME)
    with served(failing(2_500_000, error)) as server:
        for headers in ({}, {"Range": "bytes=10-"}):
            with pytest.raises(http.client.IncompleteRead) as caught:
                ask(server, "2013/a.parquet", headers=headers)
            start = 10 if headers else 0
            assert CONTENT[start:].startswith(caught.value.partial)
            assert len(caught.value.partial) + start <= 2_500_000
        assert ask(server, "2013/a.parquet", headers={"Range": "bytes=0-9"})[2] == CONTENT[:10]
    assert caplog.text.count(f"outcome='{type(error).__name__}'") == 2


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (DecryptionError("a page is altered"), 422),
        (ParquetFormatError("no Parquet"), 422),
        (KmsUnavailableError("gone", backend="x", operation="unwrap", master_key_id="k"), 503),
        (KmsAccessDeniedError("no", backend="x", operation="unwrap", master_key_id="k"), 403),
        (RuntimeError("token=s3cr3t"), 500),
    ],
)
def test_what_fails_at_once_has_a_status(error: Exception, status: int) -> None:
    with served(failing(0, error)) as server:
        found, headers, body = ask(server, "2013/a.parquet")
        assert found == status
        assert "ETag" not in headers
        assert b"s3cr3t" not in body


def test_a_file_that_is_replaced_does_not_mix() -> None:
    filesystem = memory_files(FILES)
    key, path = "2013/a.parquet", "/root/2013/a.parquet"
    with served(filesystem) as server, contextlib.closing(connected(server)) as connection:
        _, headers, _ = asked(connection, server, key, headers={"Range": "bytes=0-9"})
        former = headers["ETag"]
        filesystem.pipe_file(path, bytes(3_000_000))
        wanted = {"Range": "bytes=10-19"}
        assert asked(connection, server, key, headers=wanted | {"If-Match": former})[0] == 412
        # Without a condition, too: the server knows which version the client began to read.
        filesystem.pipe_file(path, CONTENT[::-1])
        assert asked(connection, server, key, headers=wanted)[0] == 412
        status, headers, body = asked(connection, server, key, headers=wanted | {"If-Range": former})
        assert (status, body) == (200, CONTENT[::-1])
        assert headers["ETag"] != former
        filesystem.pipe_file(path, CONTENT)
        assert asked(connection, server, key, "HEAD")[0] == 200
        assert asked(connection, server, key, headers=wanted)[2] == CONTENT[10:20]


@pytest.mark.parametrize(
    "opened",
    [("HEAD", {}), ("GET", {}), ("GET", {"Range": "bytes=-8"}), ("GET", {"Range": "bytes=0-"})],
)
def test_one_open_file_is_one_version_whatever_its_connections(opened: tuple[str, dict[str, str]]) -> None:
    """Readers have several connections, and a new one after each pause."""
    method, headers = opened
    filesystem = memory_files(FILES)
    key, path, wanted = "2013/a.parquet", "/root/2013/a.parquet", {"Range": "bytes=10-19"}
    with served(filesystem) as server:
        assert ask(server, key, method, headers)[0] in (200, 206)
        assert ask(server, key, headers=wanted)[2] == CONTENT[10:20]
        filesystem.pipe_file(path, CONTENT[::-1])
        for _ in range(3):
            status, _, body = ask(server, key, headers=wanted)
            assert status == 412
            assert b"HEAD" in body
        assert ask(server, key, method, headers)[0] in (200, 206)
        assert ask(server, key, headers=wanted)[2] == CONTENT[::-1][10:20]


def test_a_client_that_only_reads_ranges_begins_with_the_first() -> None:
    filesystem = memory_files(FILES)
    key, path = "2013/a.parquet", "/root/2013/a.parquet"
    with served(filesystem) as server:
        _, headers, body = ask(server, key, headers={"Range": "bytes=0-9"})
        assert body == CONTENT[:10]
        filesystem.pipe_file(path, CONTENT[::-1])
        assert ask(server, key, headers={"Range": "bytes=10-19"})[0] == 412
        assert ask(server, key, headers={"Range": "bytes=10-19", "If-Match": headers["ETag"]})[0] == 412


def test_a_file_that_is_replaced_while_it_is_sent_ends_the_connection() -> None:
    filesystem = memory_files({"a": bytes(20_000_000)})
    with served(filesystem) as server, contextlib.closing(connected(server)) as connection:
        # Without room to read ahead.
        connection.connect()
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.request("GET", "/" + server.url.split("/", 3)[3] + "a")
        response = connection.getresponse()
        filesystem.pipe_file("/root/a", b"x" * 20_000_000)
        with pytest.raises((http.client.IncompleteRead, ConnectionResetError)) as caught:
            response.read()
        assert b"x" not in getattr(caught.value, "partial", b"")


def test_each_request_is_logged_without_the_secret(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER_NAME)
    with served(FILES) as server, contextlib.closing(connected(server)) as connection:
        asked(connection, server, "2013/a.parquet", headers={"Range": "bytes=5-14"})
        asked(connection, server, "other")
    facts = logged(caplog)
    assert [(fact["key"], fact["start"], fact["length"], fact["sent"], fact["status"]) for fact in facts] == [
        ("2013/a.parquet", 5, 10, 10, 206),
        ("other", None, None, 0, 404),
    ]
    levels = [record.levelname for record in caplog.records if record.name == LOGGER_NAME]
    assert levels == ["INFO", "WARNING"]
    assert server.url.split("/")[3] not in caplog.text


def test_a_client_that_goes_before_it_has_its_answer_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def go(*_: object) -> None:
        raise view_server.ClientGoneError

    monkeypatch.setattr(view_server.ViewConnection, "send_bytes", go)
    with served(FILES) as server:
        for key in ("", "2013/a.parquet", "none"):
            with pytest.raises(http.client.IncompleteRead):
                ask(server, key)
    facts = logged(caplog)
    assert [(fact["key"], fact["outcome"]) for fact in facts] == [
        ("", "ClientGoneError"),
        ("2013/a.parquet", "ClientGoneError"),
        ("none", "FileNotFoundError"),
    ]


def test_a_secret_in_the_wrong_place_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with served(FILES, with_s3=True) as server, caplog.at_level(logging.INFO, LOGGER_NAME):
        secret = server.url.split("/")[3].encode()
        for before in (b"/", b"//", b"/x/", b"/view/", server.endpoint.encode() + b"/"):
            path = before + secret + b"/empty" * (len(before) > 1)
            said(server, b"GET " + path + b" HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n\r\n")
    assert len(logged(caplog)) == 5
    assert secret.decode() not in caplog.text


def test_tls_never_falls_back(tmp_path: Path) -> None:
    pem = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    trusting = ssl.create_default_context(cafile=str(pem))
    with (
        served(FILES, tls=context, host_names=["localhost"], max_connections=1) as server,
        socket.create_connection(("127.0.0.1", port_of(server))),
    ):
        # The idle connection is closed to make room.
        port = port_of(server)
        connection = http.client.HTTPSConnection("localhost", port, context=trusting, timeout=30)
        assert server.url.startswith("https://localhost:")
        assert asked(connection, server, "2013/a.parquet")[2] == CONTENT
        connection.close()
        assert said(server, b"GET PATHempty HTTP/1.1\r\nHost: HOST\r\n\r\n")[:5] != b"HTTP/"


def port_of(server: ViewServer) -> int:
    port = urlsplit(server.url).port
    assert port is not None
    return port


def make_certificate(folder: Path) -> Path:
    """Return a file with a key and a certificate for localhost."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ) + made.public_bytes(serialization.Encoding.PEM)
    path = folder / "server.pem"
    path.write_bytes(text)
    return path
