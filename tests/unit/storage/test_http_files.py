"""Files of web servers, read by ranges over loopback connections; and files of other file systems by their URI."""

from __future__ import annotations

import base64
import datetime
import functools
import http.server
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from typer.testing import CliRunner

from parquet_keytools import Keytools
from parquet_keytools.cli import app
from parquet_keytools.errors import OutputError
from parquet_keytools.storage.locations import FileLocation

TABLE = pa.table({"a": list(range(1000)), "b": [str(number) for number in range(1000)]})
SECRET = "X-Signature=abc123"


def keytools() -> Keytools:
    keys = {name: base64.b64encode(name.encode() * 16).decode() for name in "fp"}
    table = {"footer_key": "f", "column_keys": {"p": ["a"]}, "unlisted_columns": "footer_key"}
    kms = {"type": "in_memory", "keys": keys}
    return Keytools.from_mapping({"version": 1, "kms": kms, "tables": {"t": table}})


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder; records the requested ranges."""

    def __init__(self, folder: Path, *, sends_ranges: bool = True, context: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), functools.partial(Handler))
        self.folder = folder
        self.sends_ranges = sends_ranges
        self.scheme = "http" if context is None else "https"
        if context is not None:
            self.socket = context.wrap_socket(self.socket, server_side=True)
        self.sent: list[int] = []
        self.redirects: dict[str, str] = {}

    def url(self, name: str) -> str:
        return f"{self.scheme}://localhost:{self.server_port}/{name}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name = self.path.partition("?")[0].lstrip("/")
        if name in self.server.redirects:
            self.send_response(302)
            self.send_header("Location", self.server.redirects[name])
            self.end_headers()
            return
        path = self.server.folder / name
        if name.startswith("forbidden") or not path.is_file():
            self.send_error(403 if name.startswith("forbidden") else 404)
            return
        data = path.read_bytes()
        size = len(data)
        if self.server.sends_ranges:
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            data = data[first : last + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{first + len(data) - 1}/{size}")
        else:
            self.send_response(200)
        self.server.sent.append(len(data))
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Any]:
    servers = []

    def start(**options: Any) -> Server:
        server = Server(tmp_path, **options)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_files_are_read(tmp_path: Path, serve: Any) -> None:
    tools = keytools()
    for name in ("one", "two"):
        tools.write_table(TABLE, tmp_path / f"{name}.parquet")
    server = serve()
    one, two = (f"{server.url(name)}.parquet?{SECRET}" for name in ("one", "two"))
    assert tools.read_table(one).equals(TABLE)
    assert tools.read_table([two, one]).num_rows == 2000
    assert tools.dataset([one, two]).count_rows() == 2000
    assert tools.verify_file(one).conforms
    tools.decrypt_file(one, tmp_path / "plain.parquet")


def test_only_what_is_wanted_is_sent(tmp_path: Path, serve: Any) -> None:
    tools = keytools()
    big = pa.table({"a": pa.array(range(500_000)), "b": [0] * 500_000})
    tools.write_table(big, tmp_path / "big.parquet", use_dictionary=False, compression="none")
    server = serve()
    assert tools.read_table(server.url("big.parquet"), columns=["a"]).num_rows == 500_000
    assert sum(server.sent) < 0.6 * (tmp_path / "big.parquet").stat().st_size


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("missing.parquet", FileNotFoundError, "HTTP status 404$"),
        ("*.parquet", FileNotFoundError, "404; web servers do not list files: name each, not a glob$"),
        ("forbidden.parquet", PermissionError, "403"),
    ],
)
def test_errors_name_the_address_without_its_signature(
    serve: Any, name: str, kind: type[OSError], text: str
) -> None:
    server = serve()
    with pytest.raises(kind, match=text) as caught:
        keytools().read_table(f"{server.url(name)}?{SECRET}")
    assert server.url(name) in str(caught.value)
    assert SECRET not in str(caught.value)
    url = server.url(name).replace("//", "//user:password@")
    assert "password" not in str(FileLocation.resolve(f"{url}?{SECRET}"))


def test_a_server_without_ranges(tmp_path: Path, serve: Any) -> None:
    tools = keytools()
    tools.write_table(TABLE, tmp_path / "x.parquet")
    url = serve(sends_ranges=False).url("x.parquet")
    with pytest.raises(OSError, match="does not support ranges: download the file first") as caught:
        tools.read_table(f"{url}?{SECRET}")
    assert url in str(caught.value) and SECRET not in str(caught.value)


def test_a_server_that_is_not_there(serve: Any) -> None:
    server = serve()
    url = server.url("x.parquet")
    server.shutdown()
    server.server_close()
    with pytest.raises(OSError, match="could not be reached"):
        keytools().read_table(url)


def test_files_of_tls_servers_are_read_if_their_certificate_is_trusted(
    tmp_path: Path, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = certificate_of_localhost(tmp_path / "tls.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    tools = keytools()
    tools.write_table(TABLE, tmp_path / "x.parquet")
    server, plain = serve(context=context), serve()
    with pytest.raises(OSError, match=r"could not be reached.*certificate"):
        tools.read_table(server.url("x.parquet"))
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert tools.read_table(server.url("x.parquet")).equals(TABLE)
    server.redirects["moved.parquet"] = plain.url("x.parquet")
    with pytest.raises(OSError, match="redirects to an address without TLS"):
        tools.read_table(server.url("moved.parquet"))
    plain.redirects["moved.parquet"] = server.url("x.parquet")
    assert tools.read_table(plain.url("moved.parquet")).equals(TABLE)


def certificate_of_localhost(path: Path) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))
    return path


def test_nothing_is_written_there(serve: Any) -> None:
    with pytest.raises(OutputError, match="read-only"):
        keytools().write_table(TABLE, serve().url("new.parquet"))


def test_files_in_memory_by_uri(tmp_path: Path) -> None:
    tools = keytools()
    for name in ("one", "two"):
        tools.write_table(TABLE, f"memory://http-files/{name}.parquet")
    assert tools.read_table("memory://http-files/one.parquet").equals(TABLE)
    assert tools.read_table("memory://http-files").num_rows == 2000
    assert tools.read_table("memory://http-files/*.parquet").num_rows == 2000
    assert tools.dataset(["memory://http-files/two.parquet"]).count_rows() == 1000
    tools.decrypt_file("memory://http-files/one.parquet", tmp_path / "plain.parquet")


@pytest.mark.parametrize("uri", ["nonsense://user:password@host/x", "sftp://user:password@host/x"])
def test_uris_that_nothing_opens_are_not_quoted(uri: str) -> None:
    scheme = uri.partition(":")[0]
    with pytest.raises(ValueError, match=f"'{scheme}'") as caught:
        keytools().read_table(uri)
    assert "password" not in str(caught.value)
    done = CliRunner().invoke(app, ["verify", uri])
    assert done.exit_code == 2
    assert scheme in done.stderr
    assert "password" not in done.stderr
