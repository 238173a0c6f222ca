"""How many KMS calls does a data set need in which each tenant has its own key?

    python benchmarks/tenants.py [--tenants 1000] [--files 10] [--backends keystore vault aws]

Writes files of each tenant into a folder of its own, reads all, verifies all, rotates the master key of each
tenant in the KMS, and re-wraps all keys. Then it erases one tenant, and reads all others. Each step has its own
caches, like a new process. vault is a real OpenBao server; aws is moto, which shows no versions of keys, so
that every key is re-wrapped. "keys" counts operations of the KMS client, and "calls" requests to the server.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from parquet_keytools import Keytools, parse_configuration
from parquet_keytools.errors import KeytoolsError
from parquet_keytools.kms.keystore_file import Keystore
from parquet_keytools.kms.passphrase import passphrase_from_text
from parquet_keytools.kms.registry import make_client

SERVICES = Path(__file__).parents[1] / "tests" / "services"
METER = InMemoryMetricReader()


@dataclass(frozen=True)
class Kms:
    """A KMS with the master keys `footer`, and one for each tenant.

    Attributes:
        settings: The settings under `kms` in the configuration.
        prefix: The prefix of all master key identifiers.
        rotate: Makes a new version of a master key; None if the KMS shows no versions.
    """

    settings: dict[str, Any]
    prefix: str
    rotate: Callable[[str], object] | None


@contextlib.contextmanager
def keystore(names: list[str]) -> Iterator[Kms]:
    """Make a keystore."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keystore.json"
        made = Keystore.create(path, lambda: passphrase_from_text("x" * 20), scrypt_n=2**14)
        for name in names:
            made.create_key(name)
        yield Kms({"type": "keystore", "path": str(path), "passphrase": "x" * 20}, "", made.rotate_key)


@contextlib.contextmanager
def vault(names: list[str]) -> Iterator[Kms]:
    """Run an OpenBao server."""
    from openbao import OpenBao  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as folder:
        server = OpenBao(Path(folder), in_memory=True)
        try:
            server.start()
            for name in names:
                server.create_key(name)
            yield Kms({"type": "vault", "url": server.url, "token": server.root_token}, "", server.rotate_key)
        finally:
            server.stop()


@contextlib.contextmanager
def aws(names: list[str]) -> Iterator[Kms]:
    """Run a server of moto."""
    import boto3
    from moto_server import moto_server  # type: ignore[import-not-found]

    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    with moto_server() as url:
        access = {"endpoint_url": url, "aws_access_key_id": "a", "aws_secret_access_key": "b"}
        client = boto3.client("kms", region_name="eu-west-1", **access)
        for name in names:
            key_id = client.create_key()["KeyMetadata"]["KeyId"]
            client.create_alias(AliasName=f"alias/{name}", TargetKeyId=key_id)
        os.environ["AWS_ENDPOINT_URL_STS"] = url
        settings = {"type": "aws", "region": "eu-west-1", "endpoint_url": url}
        yield Kms({**settings, "access_key_id": "a", "secret_access_key": "b"}, "alias/", None)


BACKENDS = {"keystore": keystore, "vault": vault, "aws": aws}


def configuration_for(kms: Kms) -> Any:
    """Return the configuration of a table with a key for each tenant."""
    table = {
        "footer_key": "footer",
        "column_keys": {"tenant-{tenant}": ["email", "payload"]},
        "key_values": {"tenant": {"from": "partition", "pattern": "t[0-9]{1,6}"}},
        "unlisted_columns": "plaintext",
    }
    names = {name: f"{kms.prefix}{name}" for name in ("footer", "tenant-{tenant}")}
    return parse_configuration(
        {"version": 1, "kms": kms.settings, "master_keys": names, "tables": {"events": table}}
    )


def calls_so_far() -> Counter[str]:
    """Return how many requests to the server there were."""
    found: Counter[str] = Counter()
    data = METER.get_metrics_data()
    for resource in data.resource_metrics if data else ():
        for metric in resource.scope_metrics[0].metrics:
            if metric.name.endswith("kms.calls"):
                for point in metric.data.data_points:
                    found[str(point.attributes["parquet_keytools.operation"])] += point.value
    return found


def report(backend: str, tenants: int, files: int) -> None:
    """Measure one KMS, and print the figures."""
    values = [f"t{number}" for number in range(tenants)]
    rows = pa.table({"tenant": values, "email": values, "payload": values, "day": list(range(tenants))})
    with (
        BACKENDS[backend](["footer", *(f"tenant-{value}" for value in values)]) as kms,
        tempfile.TemporaryDirectory() as folder,
    ):
        configuration = configuration_for(kms)

        def write(tools: Keytools) -> None:
            for part in range(files):
                tools.write_dataset(
                    rows,
                    folder,
                    partitioning=["tenant"],
                    basename_template=f"{part}-{{i}}.parquet",
                    existing_data_behavior="overwrite_or_ignore",
                    max_partitions=tenants,
                )

        def read(tools: Keytools) -> None:
            if tools.read_table(folder).num_rows != tenants * files:
                raise RuntimeError("rows are missing")

        def rotate(tools: Keytools) -> None:
            tools.rotate(folder)

        def erase(tools: Keytools) -> None:
            erasure = tools.erasure(folder, {"tenant": values[0]})
            plan = erasure.plan()
            if not erasure.run(plan).proof.obtained or len(plan.files) != files:
                raise RuntimeError("the erasure is not proven")

        def read_others(tools: Keytools) -> None:
            erased = f"{folder}/tenant={values[0]}"
            try:
                tools.read_table(erased)
            except KeytoolsError:
                shutil.rmtree(erased)
            if tools.read_table(folder).num_rows != (tenants - 1) * files:
                raise RuntimeError("the erased rows can be read, or others are missing")

        steps = {
            "write": write,
            "read": read,
            "verify": lambda tools: tools.verify_folder(folder),
            "rotate": rotate,
            "erase one": erase,
            "read all others": read_others,
        }
        for name, step in steps.items():
            if name == "rotate" and kms.rotate is not None:
                for value in values:
                    kms.rotate(f"tenant-{value}")
            client = make_client(configuration.kms, configuration.folder)
            before, started = calls_so_far(), time.monotonic()
            with Keytools(configuration, kms=client) as tools:
                step(tools)
            seconds = time.monotonic() - started
            keys = ", ".join(f"{number:,} {kind}" for kind, number in sorted(client.call_counts.items()) if number)
            calls = ", ".join(f"{number:,} {kind}" for kind, number in sorted((calls_so_far() - before).items()))
            print(f"| {backend} | {name} | {keys} | {calls or 'none'} | {seconds:.1f} |", flush=True)
            client.close()


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=1000)
    parser.add_argument("--files", type=int, default=10)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    arguments = parser.parse_args()
    sys.path.insert(0, str(SERVICES))
    sys.path.insert(0, str(SERVICES.parent))
    metrics.set_meter_provider(MeterProvider(metric_readers=[METER]))
    print(f"{arguments.tenants:,} tenants, {arguments.files} files each\n")
    print("| KMS | step | keys | calls | seconds |\n| --- | --- | --- | --- | --- |")
    for backend in arguments.backends:
        report(backend, arguments.tenants, arguments.files)


if __name__ == "__main__":
    main()
