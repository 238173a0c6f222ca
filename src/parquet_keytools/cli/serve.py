"""`parquet-keytools serve` and `mount`: encrypted files as plain Parquet."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated

import typer

from parquet_keytools.cli import options as opt
from parquet_keytools.cli import output as out
from parquet_keytools.runtime.threads_and_forks import someone_waiting

if TYPE_CHECKING:
    import ssl

    from parquet_keytools.keytools import Keytools
    from parquet_keytools.serve.served_tree import ServedTree
    from parquet_keytools.serve.view_server import ViewServer


@opt.with_options()
def serve_command(
    path: opt.ViewedArgument,
    config: Path,
    table: str | None = None,
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=65535, help="The port; 0 selects a free port.")
    ] = 0,
    s3: bool = False,
    address: str = "127.0.0.1",
    tls_certificate: Path | None = None,
    tls_key: Path | None = None,
    host_name: list[str] | None = None,
    access_log: Path | None = None,
    json: bool = False,
) -> None:
    """Serve encrypted files as plain Parquet over HTTP, and with --s3 as S3, until Ctrl-C.

    Files are decrypted range by range as they are read, with the columns that you may read; nothing can be
    written. The URL and the credentials are random and valid for this run; anyone who has them reads what you may
    read.

    Options:
        --s3: Serve S3, too, with credentials for this run.
        --address IP: The address to listen on. Other machines can connect to an address that is not a loopback
            address: anyone with the URL or the credentials can then read decrypted columns. Such an address
            needs TLS.
        --tls-certificate FILE: PEM file with the certificate chain.
        --tls-key FILE: PEM file with its key, without a passphrase.
        --host-name NAME: The name of this server for clients, as in its certificate. Repeatable; the URL has
            the first.
        --access-log FILE: Append a line of JSON for each request.
    """
    from parquet_keytools.serve.view_server import ViewServer

    names = host_name or []
    tls = _tls(address, tls_certificate, tls_key, names)
    with contextlib.ExitStack() as stack:
        # A server outlives a restart of the KMS.
        stack.enter_context(someone_waiting(False))
        keytools = stack.enter_context(opt.open_keytools(config, KMS_SECONDS))
        tree, first = viewed_tree(keytools, path, table)
        stack.enter_context(_logging_to(access_log))
        server = ViewServer(tree, address=address, port=port, tls=tls, host_names=names, with_s3=s3)
        try:
            with server:
                _introduce(server, first)
                _wait()
        except KeyboardInterrupt:
            # Ctrl-C or SIGTERM is the usual end.
            out.say("Stopped.")


def _wait() -> None:
    threading.Event().wait()


def _tls(address: str, certificate: Path | None, key: Path | None, names: list[str]) -> ssl.SSLContext | None:
    import ipaddress
    import ssl

    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        raise typer.BadParameter("not an IP address.", param_hint="--address") from None
    if (certificate is None) != (key is None):
        raise typer.BadParameter("--tls-certificate and --tls-key go together.")
    if ip.is_unspecified and not names:
        raise typer.BadParameter("give the name that clients use with --host-name.", param_hint="--address")
    if certificate is None or key is None:
        if not ip.is_loopback:
            raise typer.BadParameter(
                "other machines can connect to it, and decrypted data would be sent without encryption; give "
                "--tls-certificate and --tls-key.",
                param_hint="--address",
            )
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for file in (certificate, key):
        file.open("rb").close()
    try:
        # With an empty passphrase, OpenSSL does not prompt for one.
        context.load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        raise typer.BadParameter(
            f"the certificate and the key do not match, or the key has a passphrase ({error.reason}).",
            param_hint="--tls-certificate",
        ) from None
    return context


@contextlib.contextmanager
def _logging_to(file: Path | None) -> Iterator[None]:
    from parquet_keytools.serve.requests_and_answers import LOGGER_NAME, AccessFormatter

    logger = logging.getLogger(LOGGER_NAME)
    handler: logging.Handler = _Refusals(logging.WARNING)
    if file is not None:
        # Only its owner may see who read what.
        file.touch(mode=0o600, exist_ok=True)
        handler = logging.FileHandler(file, encoding="utf-8")
        handler.setFormatter(AccessFormatter())
    former = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = former
        handler.close()


class _Refusals(logging.Handler):
    """Prints refused requests."""

    def emit(self, record: logging.LogRecord) -> None:
        out.say(f"Refused: {record.getMessage()}")


def _introduce(server: ViewServer, first: str) -> None:
    from parquet_keytools.serve.requests_and_answers import BUCKET
    from parquet_keytools.serve.view_server import http_lines, s3_lines

    pair = server.key_pair
    if out.json_wanted():
        s3 = pair and {
            "endpoint": server.endpoint,
            "bucket": BUCKET,
            "access_key_id": pair.access_key_id,
            "secret_access_key": pair.secret.reveal().decode(),
        }
        # Not to stderr, which often goes to logs.
        out.print_json({"url": server.url, "s3": s3})
        return
    out.answer("Serving until Ctrl-C. Anyone with this URL, or the credentials, reads what you may read.\n")
    out.answer(f"URL         {server.url}")
    for engine, line in http_lines(server.url, first).items():
        out.answer(f"{engine:<11} {line}")
    if pair is not None:
        out.answer(f"\nS3          {server.endpoint}/{BUCKET}")
        out.answer(f"key ID      {pair.access_key_id}\nsecret      {pair.secret.reveal().decode()}")
        for engine, line in s3_lines(server.endpoint, pair).items():
            out.answer(f"{engine:<11} {line}")


KMS_SECONDS = 15.0
"""Timeout of the KMS. Engines wait about half a minute for a response, and would not see the reason."""


def viewed_tree(keytools: Keytools, path: str, table: str | None) -> tuple[ServedTree, str]:
    """Return the tree of a file or folder, and the key of its first file."""
    from parquet_keytools.errors import NoParquetFilesError
    from parquet_keytools.serve.served_tree import ServedTree
    from parquet_keytools.storage.locations import FileLocation
    from parquet_keytools.storage.walk import file_or_folder

    location = opt.location_of(path, "PATH")
    only = location.name if file_or_folder(location).is_file else None
    if only is not None:
        location = FileLocation(location.filesystem, str(PurePosixPath(location.path).parent))
    tree = ServedTree(keytools.view(location, table_name=table), folder=location, only=only)
    first = next(tree.keys(""), None)
    if first is None:
        raise NoParquetFilesError(path=path)
    return tree, first


@opt.with_options()
def mount_command(
    path: opt.ViewedArgument,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="An empty folder.", exists=True, file_okay=False)
    ],
    config: Path,
    table: str | None = None,
) -> None:
    """Mount encrypted files as a folder of plain Parquet files, until Ctrl-C or `umount`.

    Files are decrypted range by range as they are read, with the columns that you may read. Only you can see them,
    and nothing can be written. Needs the extra `fuse`, libfuse, and a machine that allows mounts.
    """
    from parquet_keytools.serve.fuse_mount import mount

    if next(folder.iterdir(), None) is not None:
        raise typer.BadParameter("this folder is not empty.", param_hint="FOLDER")
    with someone_waiting(False), opt.open_keytools(config, KMS_SECONDS) as keytools:
        tree, _ = viewed_tree(keytools, path, table)
        mount(tree, folder, lambda: out.answer(f"Mounted at {folder} until Ctrl-C or umount."))
