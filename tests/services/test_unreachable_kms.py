"""The message when a KMS cannot be reached: its address, the cause, and without long waiting."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from parquet_keytools import parse_configuration
from parquet_keytools.cli import app
from parquet_keytools.configuration_check import with_short_timeout
from parquet_keytools.errors import KmsUnavailableError
from parquet_keytools.kms.aws import AwsKms, AwsSettings
from parquet_keytools.kms.azure import AzureKms, AzureSettings
from parquet_keytools.kms.client import KmsClient
from parquet_keytools.kms.contract_tests import wrap_one
from parquet_keytools.kms.gcp import GcpKms, GcpSettings
from parquet_keytools.kms.remote_client import RemoteKmsSettings
from parquet_keytools.kms.vault import VaultKms, VaultSettings
from parquet_keytools.secret_bytes import SecretBytes

CRYPTO_KEY = "projects/p/locations/l/keyRings/r/cryptoKeys/k"


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port of this machine on which nothing listens: it is bound, but never listened on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def client_for(backend: str, host: str, **limits: Any) -> KmsClient:
    match backend:
        case "vault":
            return VaultKms(VaultSettings.model_validate({"url": f"http://{host}", "token": "t", **limits}))
        case "aws":
            credentials = {"access_key_id": "x", "secret_access_key": "y"}
            where = {"region": "eu-central-1", "endpoint_url": f"http://{host}"}
            return AwsKms(AwsSettings.model_validate({**credentials, **where, **limits}))
        case "azure":
            # No token is requested before the vault has answered.
            return AzureKms(
                AzureSettings.model_validate({"vault_url": f"https://{host}", **limits}), credential=object()
            )
        case _:
            return GcpKms(GcpSettings.model_validate({"endpoint": host, "insecure": True, **limits}))


@pytest.mark.parametrize("backend", ["vault", "aws", "azure", "gcp"])
def test_a_refused_connection(backend: str, free_port: int) -> None:
    kms = client_for(backend, f"127.0.0.1:{free_port}", max_tries=2)
    with kms, pytest.raises(KmsUnavailableError) as caught:
        wrap_one(kms, SecretBytes(bytes(16)), CRYPTO_KEY if backend == "gcp" else "k")
    text = str(caught.value)
    assert f"127.0.0.1:{free_port}" in text and "the connection was refused" in text and "after 2 tries" in text
    assert backend != "aws" or "region eu-central-1" in text


def test_a_host_that_nobody_knows() -> None:
    settings = VaultSettings.model_validate({"url": "https://no.such.host.invalid", "token": "t", "max_tries": 1})
    with VaultKms(settings) as kms, pytest.raises(KmsUnavailableError, match="its host name cannot be resolved"):
        wrap_one(kms, SecretBytes(bytes(16)), "k")


def test_a_server_that_listens_and_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
        kms = client_for("vault", where, max_tries=1, call_timeout_seconds=0.2)
        with kms, pytest.raises(KmsUnavailableError, match=f"{where}: it did not answer in time"):
            wrap_one(kms, SecretBytes(bytes(16)), "k")


def test_who_waits_is_told_why_once(free_port: int, caplog: pytest.LogCaptureFixture) -> None:
    with (
        client_for("vault", f"127.0.0.1:{free_port}", timeout_seconds=4.0) as kms,
        caplog.at_level(logging.WARNING),
    ):

        def told() -> list[logging.LogRecord]:
            with pytest.raises(KmsUnavailableError):
                wrap_one(kms, SecretBytes(bytes(16)), "k")
            return [record for record in caplog.records if "waiting for the KMS" in record.message]

        # The pauses are random: a call may make its last attempt before the message is due.
        assert any(told() for _ in range(5))
        (record,) = told()
    assert f"at http://127.0.0.1:{free_port} (the connection was refused)" in record.message


def test_check_waits_a_few_seconds_only(free_port: int, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        f"version: 1\nkms: {{type: vault, url: 'http://127.0.0.1:{free_port}', token: t}}\n"
        "tables: {t: {footer_key: k, unlisted_columns: footer_key}}\n"
    )
    config.chmod(0o600)
    done = CliRunner().invoke(app, ["check", str(config)])
    assert done.exit_code == 3 and "the connection was refused" in " ".join(done.stderr.split())


def test_what_is_shorter_stays_as_it_is() -> None:
    def limits(**settings: Any) -> tuple[float, float]:
        kms = {"type": "vault", "url": "https://kms.example", "token": "t", **settings}
        configuration = with_short_timeout(parse_configuration({"version": 1, "kms": kms}))
        assert isinstance(configuration.kms, RemoteKmsSettings)
        return configuration.kms.timeout_seconds, configuration.kms.call_timeout_seconds

    assert limits() == (4.0, 4.0)
    assert limits(timeout_seconds=2.0, call_timeout_seconds=1.0) == (2.0, 1.0)
    assert limits(call_timeout_seconds=30.0) == (4.0, 4.0)
    in_memory = parse_configuration({"version": 1, "kms": {"type": "in_memory", "keys": ["k"]}})
    assert with_short_timeout(in_memory) is in_memory
