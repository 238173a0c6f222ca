"""Commands whose KMS cannot be reached, and `check` of many keys: they end soon, and report what is left."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from parquet_keytools import Keytools, cli, parse_configuration
from parquet_keytools.configuration_check import Role, check_master_keys
from parquet_keytools.errors import KmsAccessDeniedError, KmsConfigurationError, KmsUnavailableError
from parquet_keytools.kms.client import UnwrapRequest, WrapRequest
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.kms.remote_client import RemoteKmsClient, RemoteKmsSettings
from parquet_keytools.secret_bytes import SecretBytes

FILES = 12
TABLE = pa.table({"id": [1, 2, 3], "name": ["x", "y", "z"]})
TABLES = {"t": {"footer_key": "k", "column_keys": {"p": ["name"]}, "unlisted_columns": "footer_key"}}
CONFIGURATION = parse_configuration(
    {"version": 1, "kms": {"type": "in_memory", "keys": ["k", "p"]}, "tables": TABLES}
)


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port of this machine on which nothing listens: it is bound, but never listened on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.fixture
def down(tmp_path: Path, free_port: int, request: pytest.FixtureRequest) -> Path:
    """A configuration whose KMS refuses connections; the tests allow much more time than the commands."""
    url = f"http://127.0.0.1:{free_port}"
    tries = getattr(request, "param", 3)
    kms = {"type": "vault", "url": url, "token": "t", "timeout_seconds": 300, "max_tries": tries}
    config = tmp_path / "down.yaml"
    config.write_text(json.dumps({"version": 1, "kms": kms, "tables": TABLES}))
    config.chmod(0o600)
    return config


class TransitForm(InMemoryKms):
    """Makes wrapped keys in the form of a transit engine."""

    def _wrap(self, key: SecretBytes, master_key_id: str) -> str:
        return "vault:v1:" + super()._wrap(key, master_key_id)


def encrypted(folder: Path) -> Path:
    """Return files that each have a KEK wrapped by some transit engine."""
    folder.mkdir()
    for number in range(FILES):
        kms = TransitForm({"k": bytes(16), "p": bytes(16)})
        with Keytools(CONFIGURATION, kms=kms) as tools:
            tools.write_table(TABLE, folder / f"{number:02}.parquet")
    return folder


def plain(folder: Path) -> Path:
    folder.mkdir()
    for number in range(FILES):
        pq.write_table(TABLE, folder / f"{number:02}.parquet")
    return folder


def run(*arguments: object) -> tuple[Result, float]:
    start = time.monotonic()
    done = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    return done, time.monotonic() - start


@pytest.mark.parametrize("command", ["encrypt", "decrypt"])
def test_a_conversion_ends_and_says_what_is_left(tmp_path: Path, down: Path, command: str) -> None:
    data = (plain if command == "encrypt" else encrypted)(tmp_path / "data")
    done, seconds = run(command, data, tmp_path / "new", "--config", down, "--json")
    assert done.exit_code == 3, done.output
    assert seconds < 60, "each file waited for the KMS"
    document = json.loads(done.stdout)
    assert [failure["error"] for failure in document["failures"]] == ["KmsUnavailableError"]
    assert len(document["not_attempted"]) == FILES - 1
    again = f"parquet-keytools {command} {data} {tmp_path / 'new'} --config {down} --json --skip-existing"
    assert again in done.stderr


# Only the time shows that `keys` and `verify` give up: they try as often as there is time.
@pytest.mark.parametrize(
    ("command", "down"),
    [(["keys"], 100), (["verify"], 100), (["rotate"], 3), (["rekey", "--in-place"], 3)],
    indirect=["down"],
)
def test_a_command_over_encrypted_files_ends(tmp_path: Path, down: Path, command: list[str]) -> None:
    data = encrypted(tmp_path / "data")
    done, seconds = run(*command, data, "--config", down, "--json")
    assert done.exit_code == 3, done.output
    assert seconds < 60, "each file waited for the KMS"
    document = json.loads(done.stdout)
    if command[0] == "verify":
        assert document["verdict"] == "incomplete" and len(document["files"]) == FILES
        assert f"parquet-keytools verify {data}" in done.stderr
    elif command[0] != "keys":
        assert document["complete"] is False
        assert document["counts"] == {"failed": 1, "not attempted": FILES - 1}
        outcomes = {Path(file["path"]).name: file["outcome"] for file in document["files"]}
        assert len(outcomes) == FILES and outcomes["00.parquet"] == "failed"
        assert f"repeat the command: parquet-keytools {' '.join(command)} {data}" in done.stderr


def test_an_encryption_in_place_says_what_is_left(tmp_path: Path, down: Path) -> None:
    data = plain(tmp_path / "data")
    before = {path: path.read_bytes() for path in data.iterdir()}
    done, _ = run("encrypt", data, "--in-place", "--config", down, "--json", "--processes", 2)
    assert done.exit_code == 3, done.output
    assert json.loads(done.stdout)["counts"] == {"failed": 1, "not attempted": FILES - 1}
    assert f"repeat the command: parquet-keytools encrypt {data} --in-place" in done.stderr
    assert {path: path.read_bytes() for path in data.iterdir()} == before


def test_a_uri_with_credentials_is_not_printed_again(tmp_path: Path, down: Path) -> None:
    data = plain(tmp_path / "data")
    done, _ = run("encrypt", f"{data}", "memory://user:canary@host/new", "--config", down)
    assert done.exit_code == 3 and "repeat the command" in done.output
    assert "canary" not in done.output


# --- check ---


class SlowSettings(RemoteKmsSettings):
    type: str = "slow"


class SlowKms(RemoteKmsClient):
    """A KMS that answers each call with a delay."""

    backend = "slow"
    Settings = SlowSettings

    def __init__(self, seconds: float) -> None:
        super().__init__(SlowSettings())
        self._seconds = seconds
        self._kms = InMemoryKms({f"k{number}": bytes(16) for number in range(200)})

    @classmethod
    def from_settings(cls, settings: Any, folder: Path) -> SlowKms:
        raise NotImplementedError

    def _wrap_many(self, requests: Any) -> Any:
        return self._operation("wrap").each(requests, self._wrap)

    def _unwrap_many(self, requests: Any) -> Any:
        return self._operation("unwrap").each(requests, self._unwrap)

    def _describe(self, master_key_id: str) -> Any:
        raise NotImplementedError

    def _wrap(self, request: WrapRequest, seconds: float) -> str:
        time.sleep(self._seconds)
        return str(self._kms.wrap_many([request])[0])

    def _unwrap(self, request: UnwrapRequest, seconds: float) -> Any:
        time.sleep(self._seconds)
        return self._kms.unwrap_many([request])[0]


def test_a_check_of_many_keys_ends_and_names_the_keys_that_were_not_tried() -> None:
    keys = {f"name{number}": f"k{number}" for number in range(200)}
    in_memory = {"type": "in_memory", "keys": list(keys.values())}
    configuration = parse_configuration({"version": 1, "kms": in_memory, "master_keys": keys})
    with SlowKms(0.2) as kms:
        kms.end_within(1.0)
        start = time.monotonic()
        outcomes = [check.outcome for check in check_master_keys(configuration, kms)]
        assert time.monotonic() - start < 30  # 2.8 seconds without load, if all keys are checked
    assert outcomes[0] == "ok" and outcomes[-1] == "not tried" and "failed" not in outcomes


@pytest.mark.parametrize("role", ["reader", "rotator"])
def test_a_kms_whose_permissions_cannot_be_tried_passes_no_check(role: Role) -> None:
    in_memory = {"type": "in_memory", "keys": ["k1"]}
    configuration = parse_configuration({"version": 1, "kms": in_memory, "master_keys": {"name": "k1"}})
    with SlowKms(0) as kms:
        (check,) = check_master_keys(configuration, kms, role)
        assert check.outcome == "not tried"
        assert "permissions can be tried only with keys that it wrapped" in str(check.error)
        assert [found.outcome for found in check_master_keys(configuration, kms, "writer")] == ["ok"]
        assert not kms.call_counts["unwrap"] and not kms.call_counts["rewrap"]


# --- credentials ---


class Expiring(InMemoryKms):
    """A KMS whose credentials expire after the footer's key was unwrapped."""

    def _unwrap(self, wrapped_key: str, master_key_id: str) -> SecretBytes:
        if master_key_id == "p":
            raise KmsConfigurationError("the token has expired")
        return super()._unwrap(wrapped_key, master_key_id)


def test_credentials_that_expire_between_footer_and_column(tmp_path: Path) -> None:
    kms = Expiring({"k": bytes(16), "p": bytes(16)})
    with Keytools(CONFIGURATION, kms=kms) as tools:
        tools.write_table(TABLE, tmp_path / "a.parquet")
        for read in (
            lambda: tools.read_table(tmp_path / "a.parquet"),
            lambda: tools.decrypt_file(tmp_path / "a.parquet", tmp_path / "b.parquet"),
        ):
            tools.clear_caches()
            with pytest.raises(KmsConfigurationError, match="the token has expired"):
                read()
    assert not (tmp_path / "b.parquet").exists()


# --- verify unwraps the keys of many files together ---


class Counting(InMemoryKms):
    requests = 0

    def _unwrap_many(self, requests: Any) -> Any:
        self.requests += 1
        return super()._unwrap_many(requests)


def test_verify_asks_for_the_keys_of_many_files_together(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    kms = Counting({"k": bytes(16), "p": bytes(16)})
    with Keytools(CONFIGURATION, kms=kms) as tools:
        for number in range(FILES):
            tools.clear_caches()
            tools.write_table(TABLE, folder / f"{number:02}.parquet")
        tools.clear_caches()
        (folder / "05.parquet").write_bytes(b"PAR1 no file PAR1")
        report = tools.verify_folder(folder)
        verdicts = [file.verdict.value for file in report.files]
        assert verdicts.count("conforms, with weaknesses") == FILES - 1
    # Each of 11 files has two KEKs: one by one, this would be 22 requests.
    assert kms.requests < 14


def test_an_error_of_the_kms_is_no_error_of_a_column(tmp_path: Path) -> None:
    class Down(InMemoryKms):
        def _unwrap(self, wrapped_key: str, master_key_id: str) -> SecretBytes:
            raise KmsUnavailableError("it is down")

    kms = Down({"k": bytes(16), "p": bytes(16)})
    with Keytools(CONFIGURATION, kms=kms) as tools:
        tools.write_table(TABLE, tmp_path / "a.parquet")
        tools.clear_caches()
        report = tools.verify_file(tmp_path / "a.parquet")
    assert report.verdict.value == "incomplete" and report.kms_is_unavailable


# --- a writer that may not unwrap ---


@pytest.mark.parametrize("plaintext_footer", [False, True])
def test_a_writer_that_cannot_unwrap_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plaintext_footer: bool
) -> None:
    def refused(*_: object) -> SecretBytes:
        raise KmsAccessDeniedError

    monkeypatch.setattr(InMemoryKms, "_unwrap", refused)
    kms = {"type": "in_memory", "keys": dict.fromkeys(("k", "p", "q"), "MDEyMzQ1Njc4OTAxMjM0NQ==")}
    config = tmp_path / "writer.yaml"

    def configure(footer_key: str) -> None:
        table = {**TABLES["t"], "footer_key": footer_key, "plaintext_footer": plaintext_footer}
        config.write_text(json.dumps({"version": 1, "kms": kms, "tables": {"t": table}}))
        config.chmod(0o600)

    configure("k")
    data, new = plain(tmp_path / "data"), tmp_path / "new"
    assert run("encrypt", data, new, "--config", config)[0].exit_code == 0
    assert run("encrypt", data, new, "--config", config, "--skip-existing")[0].exit_code == 3
    (new / "03.parquet").unlink()
    done, _ = run("encrypt", data, new, "--config", config, "--skip-existing=unauthenticated")
    assert done.exit_code == 0, done.output
    assert f"{FILES - 1} skipped" in done.stdout and "nothing was authenticated" in done.stdout
    assert (new / "03.parquet").exists()
    # A plaintext file, and files under another key, are not skipped.
    pq.write_table(TABLE, new / "05.parquet")
    done, _ = run("encrypt", data, new, "--config", config, "--skip-existing=unauthenticated")
    assert done.exit_code == 2 or done.exit_code == 1, done.output
    assert "05.parquet" in done.stderr
    configure("q")
    done, _ = run("encrypt", data, new, "--config", config, "--skip-existing=unauthenticated")
    assert "Encrypted 0 of" in done.stdout and "skipped" not in done.stdout
