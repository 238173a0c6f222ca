"""What do the keys of a large data set cost? All keys of files from as many writers, unwrapped in two ways.

    python benchmarks/kms_cost.py [--files 1000] [--backends vault aws gcp] [--latencies 5 50] [--rounds 1]

Each file has three KEKs of its own, as if each was written by another process. Theirs is pyarrow's CryptoFactory
with a KmsClient of a few lines that calls the same SDK for one key at a time; it gets the footer and column keys
of each file. Ours is `Keytools.dataset` with all columns named, which reads and verifies all footers and then has
all keys ("open"), and
only the unwrapping ("keys": key material in, DEKs out). Both run in this process, one after the other, against
the same server in another process, behind a proxy that adds the latency. vault is a real OpenBao server; aws and
gcp are the fakes of the tests, over HTTP and gRPC.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.encryption.footer import read_envelope
from parquet_keytools.keys.key_material import parse_key_metadata
from parquet_keytools.keys.key_wrapping import KeyUnwrapper, KmsKeys
from parquet_keytools.storage.locations import FileLocation, open_source

SERVICES = Path(__file__).parents[1] / "tests" / "services"
MASTER_KEYS = ("footer", "first", "second")
COLUMNS = ("a", "b")
TABLE = pa.table({"a": range(100), "b": range(100), "c": range(100)})


# --- the servers, each in its own process ---


@dataclass(frozen=True)
class Server:
    """A running KMS.

    Attributes:
        address: Host and port.
        facts: Facts that its clients need, such as a token.
    """

    address: str
    facts: dict[str, Any]


def run_aws(pipe: Connection) -> None:
    """Serve the fake of AWS KMS until the pipe is closed."""
    sys.path.insert(0, str(SERVICES))
    from aws_fake import FakeKms, serve  # type: ignore[import-not-found]

    fake = FakeKms()
    for name in MASTER_KEYS:
        fake.add_key(name)
    with serve(fake) as url:
        pipe.send(Server(url.removeprefix("http://"), {}))
        with contextlib.suppress(EOFError):
            pipe.recv()


def run_gcp(pipe: Connection) -> None:
    """Serve the fake of Cloud KMS until the pipe is closed."""
    sys.path.insert(0, str(SERVICES))
    import gcp_fake  # type: ignore[import-not-found]

    with gcp_fake.fake_gcp_kms(*MASTER_KEYS) as fake:
        pipe.send(Server(fake.endpoint, {"key_ring": gcp_fake.KEY_RING}))
        with contextlib.suppress(EOFError):
            pipe.recv()


@contextlib.contextmanager
def in_other_process(run: Callable[[Connection], None]) -> Iterator[Server]:
    """Run a server in another process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run, args=(theirs,))
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        ours.close()
        process.join(20)


@contextlib.contextmanager
def openbao() -> Iterator[Server]:
    """Run an OpenBao server."""
    sys.path.insert(0, str(SERVICES))
    from openbao import OpenBao  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as folder:
        server = OpenBao(Path(folder), in_memory=True)
        try:
            server.start()
            for name in MASTER_KEYS:
                server.create_key(name)
            yield Server(server.url.removeprefix("http://"), {"token": server.root_token})
        finally:
            server.stop()


@contextlib.contextmanager
def delayed(server: Server, milliseconds: float) -> Iterator[Server]:
    """Put latency before a server."""
    command = [sys.executable, str(Path(__file__).with_name("latency_proxy.py")), "--to", server.address]
    command += ["--milliseconds", str(milliseconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Server(f"127.0.0.1:{process.stdout.readline().strip()}", server.facts)
        finally:
            process.terminate()


# --- short clients, as users write them for CryptoFactory ---


class OneKeyAtATime(pe.KmsClient):  # type: ignore[misc]
    """Counts its calls; a subclass makes them."""

    calls = 0

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.connect(server)

    def connect(self, server: Server) -> None:
        raise NotImplementedError

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> str:
        raise NotImplementedError

    def unwrap_key(self, wrapped_key: str, master_key_identifier: str) -> bytes:
        type(self).calls += 1
        return self.decrypt(wrapped_key, master_key_identifier)

    def decrypt(self, wrapped_key: str, master_key_id: str) -> bytes:
        raise NotImplementedError


class WithHvac(OneKeyAtATime):
    """Vault and OpenBao."""

    def connect(self, server: Server) -> None:
        import hvac

        self._vault = hvac.Client(f"http://{server.address}", token=server.facts["token"])

    def decrypt(self, wrapped_key: str, master_key_id: str) -> bytes:
        answer = self._vault.secrets.transit.decrypt_data(name=master_key_id, ciphertext=wrapped_key)
        return base64.b64decode(answer["data"]["plaintext"])


class WithBoto3(OneKeyAtATime):
    """AWS KMS."""

    def connect(self, server: Server) -> None:
        import boto3

        self._aws = boto3.client(
            "kms",
            region_name="eu-west-1",
            endpoint_url=f"http://{server.address}",
            aws_access_key_id="AKIAEXAMPLE",
            aws_secret_access_key="x",
        )

    def decrypt(self, wrapped_key: str, master_key_id: str) -> bytes:
        # pyarrow's key names must not contain a slash followed by a colon; ours are aliases.
        answer = self._aws.decrypt(CiphertextBlob=base64.b64decode(wrapped_key), KeyId=master_key_id)
        plaintext: bytes = answer["Plaintext"]
        return plaintext


class WithGoogle(OneKeyAtATime):
    """Google Cloud KMS."""

    def connect(self, server: Server) -> None:
        import grpc
        from google.cloud.kms_v1 import KeyManagementServiceClient
        from google.cloud.kms_v1.services.key_management_service.transports import (
            KeyManagementServiceGrpcTransport,
        )

        transport = KeyManagementServiceGrpcTransport(channel=grpc.insecure_channel(server.address))
        self._google = KeyManagementServiceClient(transport=transport)
        self._key_ring = server.facts["key_ring"]

    def decrypt(self, wrapped_key: str, master_key_id: str) -> bytes:
        answer = self._google.decrypt(
            name=f"{self._key_ring}/cryptoKeys/{master_key_id}", ciphertext=base64.b64decode(wrapped_key)
        )
        plaintext: bytes = answer.plaintext
        return plaintext


# --- the backends ---


@dataclass(frozen=True)
class Backend:
    """How to run and use a KMS.

    Attributes:
        serve: Runs it.
        kms: The settings under `kms` in the configuration.
        theirs: The client for CryptoFactory.
        master_key_ids: The identifiers in the KMS.
    """

    serve: Callable[[], contextlib.AbstractContextManager[Server]]
    kms: Callable[[Server], dict[str, Any]]
    theirs: type[OneKeyAtATime]
    master_key_ids: tuple[str, ...] = MASTER_KEYS


def vault_settings(server: Server) -> dict[str, Any]:
    """Return the configuration of vault."""
    return {"type": "vault", "url": f"http://{server.address}", "token": server.facts["token"]}


def aws_settings(server: Server) -> dict[str, Any]:
    """Return the configuration of aws."""
    return {
        "type": "aws",
        "region": "eu-west-1",
        "endpoint_url": f"http://{server.address}",
        "access_key_id": "AKIAEXAMPLE",
        "secret_access_key": "x",
    }


def gcp_settings(server: Server) -> dict[str, Any]:
    """Return the configuration of gcp."""
    _, project, _, location, _, key_ring = server.facts["key_ring"].split("/")
    place = {"project": project, "location": location, "key_ring": key_ring}
    return {"type": "gcp", "endpoint": server.address, "insecure": True, **place}


BACKENDS = {
    "vault": Backend(openbao, vault_settings, WithHvac),
    "aws": Backend(
        lambda: in_other_process(run_aws),
        aws_settings,
        WithBoto3,
        tuple(f"alias/{name}" for name in MASTER_KEYS),
    ),
    "gcp": Backend(lambda: in_other_process(run_gcp), gcp_settings, WithGoogle),
}


def keytools_for(backend: Backend, server: Server) -> Keytools:
    """Return a Keytools for a table with a footer key and two column keys."""
    footer, *columns = backend.master_key_ids
    table = {
        "footer_key": footer,
        "column_keys": {key: [name] for key, name in zip(columns, COLUMNS, strict=True)},
        "unlisted_columns": "plaintext",
    }
    return Keytools(parse_configuration({"version": 1, "kms": backend.kms(server), "tables": {"t": table}}))


# --- the measurement ---


def write_files(tools: Keytools, folder: Path, number: int) -> list[Path]:
    """Write files, each with its own KEKs."""
    paths = [folder / f"{position:05d}.parquet" for position in range(number)]
    for path in paths:
        tools.clear_caches()
        tools.write_table(TABLE, path)
    tools.clear_caches()
    return paths


def open_theirs(client: type[OneKeyAtATime], server: Server, paths: list[Path]) -> None:
    """Get all keys of all files with CryptoFactory."""
    factory = pe.CryptoFactory(lambda _: client(server))
    connection = pe.KmsConnectionConfig()
    for path in paths:
        properties = factory.file_decryption_properties(connection)
        metadata = pq.read_metadata(path, decryption_properties=properties)
        for ordinal in range(len(COLUMNS)):
            # Arrow fetches a column's key when its metadata is read.
            assert metadata.row_group(0).column(ordinal).num_values == TABLE.num_rows


def materials_of(tools: Keytools, paths: list[Path]) -> list[Any]:
    """Return the key material of all keys of all files."""
    materials = []
    for opened in tools._keys.open_files([FileLocation.resolve(path) for path in paths]):
        with open_source(opened.location) as source:
            metadata = [read_envelope(source).key_metadata]
        metadata += [column.key_metadata for column in opened.footer.columns]
        materials += [parse_key_metadata(found) for found in metadata if found]
    return materials


def report(
    name: str, milliseconds: float, arguments: argparse.Namespace, server: Server, paths: list[Path]
) -> None:
    """Measure one KMS with one latency, and print the figures."""
    backend = BACKENDS[name]
    seconds: dict[str, list[float]] = {"theirs": [], "open": [], "keys": []}
    calls: dict[str, int] = {}
    with delayed(server, milliseconds) as far, keytools_for(backend, far) as tools:
        materials = materials_of(tools, paths)
        assert len({material.kms_wrapped_key for material in materials}) == 3 * len(paths)
        for _ in range(arguments.rounds):
            tools.clear_caches()
            assert tools.kms is not None
            sent = CountedCalls(tools.kms)
            start = time.perf_counter()
            # All refused columns must then be known for all files: none is left to a scan.
            tools.dataset(paths[0].parent, columns=COLUMNS)
            seconds["open"].append(time.perf_counter() - start)
            calls["open"] = sent.number
            sent = CountedCalls(tools.kms)
            start = time.perf_counter()
            deks = KmsKeys(KeyUnwrapper(tools.kms, time.monotonic), 600).deks(materials)
            seconds["keys"].append(time.perf_counter() - start)
            calls["keys"] = sent.number
            assert not any(isinstance(dek, Exception) for dek in deks)
            backend.theirs.calls = 0
            start = time.perf_counter()
            open_theirs(backend.theirs, far, paths)
            seconds["theirs"].append(time.perf_counter() - start)
            calls["theirs"] = backend.theirs.calls
    for way, label in (("theirs", "CryptoFactory"), ("open", "Keytools.dataset"), ("keys", "its keys alone")):
        median = statistics.median(seconds[way])
        ratios = [their / our for their, our in zip(seconds["theirs"], seconds[way], strict=True)]
        print(
            f"  {name:6} {milliseconds:4.0f} ms   {label:17} {median:8.2f} s   {calls[way]:6,} calls   "
            f"{statistics.median(ratios):6.1f} times as fast",
            flush=True,
        )
    if arguments.json:
        print(json.dumps({"backend": name, "milliseconds": milliseconds, "seconds": seconds, "calls": calls}))


class CountedCalls:
    """Counts the calls that a client makes from now on; each attempt is one call."""

    def __init__(self, kms: Any) -> None:
        self.number = 0
        original = getattr(kms, "_uncounted", kms._call)
        kms._uncounted = original

        def call(operation: str, master_key_id: str | None, send: Callable[[float], Any]) -> Any:
            def counted(seconds: float) -> Any:
                self.number += 1
                return send(seconds)

            return original(operation, master_key_id, counted)

        kms._call = call


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--latencies", nargs="+", type=float, default=[5, 50], help="in milliseconds")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--json", action="store_true", help="print all figures, too")
    arguments = parser.parse_args()
    print(f"{arguments.files:,} files with three KEKs each, medians of {arguments.rounds} round(s)")
    for name in arguments.backends:
        backend = BACKENDS[name]
        with backend.serve() as server, tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            with keytools_for(backend, server) as tools:
                paths = write_files(tools, Path(folder), arguments.files)
            for milliseconds in arguments.latencies:
                report(name, milliseconds, arguments, server, paths)


if __name__ == "__main__":
    main()
