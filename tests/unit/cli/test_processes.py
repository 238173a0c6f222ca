"""Folders of many small files in several processes: the same results as in one process, whatever fails."""

from __future__ import annotations

import base64
import json
import logging
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from copying_program import PIDS
from faults import let_a_worker_die_at_work
from fsspec.implementations.dirfs import DirFileSystem
from soak import SOAK
from unit.cli.conftest import MASTER_KEYS
from vector_kit.breaches import breaking_vectors
from vector_kit.write_kit import data_keys, place_vector

from parquet_keytools import Keytools, audit
from parquet_keytools.config import loader
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.kms.keystore_file import Keystore
from parquet_keytools.kms.passphrase import passphrase_from_file
from parquet_keytools.runtime import worker_processes
from parquet_keytools.runtime.worker_processes import command_line_processes
from parquet_keytools.storage.locations import FileLocation, fsspec_of

FILES = 9


@pytest.fixture
def many(tmp_path: Path, table: pa.Table) -> Path:
    root = tmp_path / "many"
    for number in range(FILES):
        path = root / f"year={number % 2}" / f"{number}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path)
    return root


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The number of worker processes that each command starts, if it starts any."""
    numbers: list[Any] = []

    class Recording(ProcessPoolExecutor):
        def __init__(self, number: int, *args: Any, **options: Any) -> None:
            numbers.append(number)
            super().__init__(number, *args, **options)

    monkeypatch.setattr(worker_processes, "ProcessPoolExecutor", Recording)
    return numbers


def data_set_verified(run: Callable[..., Any], folder: Path, config: Path, processes: int) -> Any:
    return json.loads(run("verify", folder, "--config", config, "--json", "--processes", processes).stdout)


def without_times(text: str, *paths: Path) -> str:
    for path in paths:
        text = text.replace(str(path), "PATH")
    return re.sub(r"\d+\.\d s", "SECONDS", text)


@pytest.mark.usefixtures("warm_workers")
def test_commands_say_the_same(run, config: Path, many: Path, tmp_path: Path, table: pa.Table) -> None:
    said: dict[int, list[str]] = {1: [], 2: []}
    (many / "year=1" / "notes.txt").write_text("left out")
    (many / "year=1" / "bad.parquet").write_bytes(b"PAR1 and nothing else PAR1")
    for number in (1, 2):
        out = tmp_path / f"with {number}"
        encrypted, decrypted, rekeyed = (out / name for name in ("encrypted", "decrypted", "rekeyed"))
        more = ("--config", config, "--processes", number)
        for command, status in (
            (("encrypt", many, encrypted), 1),
            (("decrypt", encrypted, decrypted, "--mode", "640", "--json"), 0),
            # Workers of the next tests, too.
            *(
                [
                    (("encrypt", many, encrypted, "--skip-existing", "--json"), 1),
                    (("verify", encrypted, "--json"), 0),
                    (("rekey", encrypted, rekeyed), 0),
                ]
                if SOAK
                else []
            ),
        ):
            done = run(*command, *more)
            assert done.exit_code == status, done.output
            said[number].append(without_times(done.output, out))
        assert Keytools.from_yaml(config).read_table(encrypted).num_rows == FILES * table.num_rows
        assert {path.stat().st_mode & 0o777 for path in decrypted.rglob("*.parquet")} == {0o640}
        assert len(list(decrypted.rglob("*.parquet"))) == FILES
    assert said[1] == said[2]
    assert "bad.parquet" in said[2][0] and f"Encrypted {FILES} of {FILES + 1} files" in said[2][0]


# --- files that share keys, in different processes ---


@pytest.fixture
def sharing(tmp_path: Path, config: Path) -> Path:
    """Eight files that pandas wrote with the same properties."""
    frame = pd.DataFrame(
        {"id": range(80), "name": [f"name {row}" for row in range(80)], "part": list(range(8)) * 10}
    )
    schema = pa.Schema.from_pandas(frame[["id", "name"]], preserve_index=False)
    properties = Keytools.from_yaml(config).encryption_properties("people", schema, "any.parquet")
    frame.to_parquet(tmp_path / "sharing", partition_cols=["part"], encryption_properties=properties)
    return tmp_path / "sharing"


@pytest.mark.usefixtures("warm_workers")
def test_files_that_share_keys_are_found_in_whatever_process(
    run, config: Path, sharing: Path, tmp_path: Path
) -> None:
    first, *others = sorted(sharing.rglob("*.parquet"))
    done = run("decrypt", sharing, tmp_path / "out", "--config", config, "--processes", 2, "--verbose")
    assert done.exit_code == 1
    assert "Decrypted 1 of 8 files" in done.stdout
    for other in others:
        assert f"Failed: {other} and {first} share their data keys and file unique" in done.stderr
    assert [path.parent.name for path in (tmp_path / "out").rglob("*.parquet")] == [first.parent.name]
    done = run("rekey", sharing, tmp_path / "new", "--config", config, "--processes", 2, "--verbose")
    assert done.exit_code == 0
    assert done.stderr.count("share their data keys and file unique") == 7


@pytest.mark.usefixtures("warm_workers")
def test_nonces_of_different_processes_are_compared(run, tmp_path: Path, started: list[Any]) -> None:
    """Two files that share a DEK and one nonce: each is verified by a different worker."""
    vectors = {vector.rule: vector for vector in breaking_vectors() if vector.rule is not None}
    folder = place_vector(vectors["nonce-shared"], tmp_path)
    # The first file is verified here.
    (folder / "0.parquet").write_bytes(vectors["invocations-shared"].contents()["a.parquet"])
    config = tmp_path / "keys.yaml"
    keys = {name: base64.b64encode(key).decode() for name, key in data_keys().items()}
    config.touch(mode=0o600)
    config.write_text(json.dumps({"version": 1, "data_keys": keys}))
    one = data_set_verified(run, folder, config, 1)
    assert not started
    two = data_set_verified(run, folder, config, 2)
    assert started == [2]
    assert one == two
    (nonces, shared) = (
        rule for name in ("nonce-shared", "dek-shared") for rule in two["rules"] if rule["id"] == name
    )
    assert nonces["outcome"] == shared["outcome"] == "broken"
    assert [finding["message"] for finding in nonces["findings"]] == [
        "one module has the same DEK and nonce in a.parquet and b.parquet."
    ]


# --- files that no other process can open ---


@pytest.mark.parametrize("scheme", ["memory", "mock", "dir"])
def test_files_in_the_memory_of_this_process_stay_here(
    config: Path, plain: Path, scheme: str, started: list[Any]
) -> None:
    location = FileLocation.resolve(f"memory://{uuid.uuid4()}" if scheme != "mock" else "mock:///")
    filesystem: Any = location.filesystem
    if scheme == "dir":
        filesystem = DirFileSystem(location.path, fsspec_of(filesystem))
    tools = Keytools.from_yaml(config)
    files = [location.below(f"{number}.parquet") for number in range(4)]
    location.filesystem.create_dir(location.path)
    for file in files:
        tools.encrypt_file(plain, file)
    folder = FileLocation.resolve("" if scheme == "dir" else location.path, filesystem)
    with command_line_processes(2):
        report = tools.verify_folder(folder)
    assert report.conforms and len(report.files) == 4
    assert not started


def test_files_are_written_to_the_memory_of_this_process(
    run, config: Path, folder: Path, started: list[Any]
) -> None:
    target = FileLocation.resolve(f"memory://{uuid.uuid4()}")
    done = run("encrypt", folder, f"memory:/{target.path}", "--config", config, "--processes", 2)
    assert done.exit_code == 0 and "Encrypted 3 files" in done.stdout
    assert Keytools.from_yaml(config).verify_folder(target).conforms
    assert not started


# --- keys ---


def test_no_secret_is_pickled_and_what_cannot_be_stays_here(
    tmp_path: Path, many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = base64.b64encode(b"a key of 16 byte").decode()
    monkeypatch.setenv("SECRET_KEY", secret)
    keys = {"footer": "${SECRET_KEY}", "pii": "${SECRET_KEY}"}
    document: dict[str, Any] = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": keys},
        "tables": {
            "people": {"footer_key": "footer", "column_keys": {"pii": ["name"]}, "unlisted_columns": "plaintext"}
        },
    }
    tools = Keytools.from_mapping(document)
    encrypted = tmp_path / "encrypted"
    encrypted.mkdir()
    for number, path in enumerate(sorted(many.rglob("*.parquet"))):
        tools.encrypt_file(path, encrypted / f"{number}.parquet")
    pickled = list[bytes]()

    def dumps(thing: object) -> bytes:
        pickled.append(pickle.dumps(thing))
        return pickled[-1]

    with command_line_processes(2), monkeypatch.context() as patch:
        patch.setattr(worker_processes, "pickle", SimpleNamespace(dumps=dumps))
        assert tools.verify_folder(encrypted).conforms
    assert b"SECRET_KEY" in pickled[0]
    for form in (secret.encode(), b"a key of 16 byte", b"a key of 16 byte".hex().encode()):
        assert form not in pickled[0]

    # Keys in a mapping, or in a client that was passed in, do not leave this process.
    open_keys = dict.fromkeys(keys, secret)
    in_document = Keytools.from_mapping(document | {"kms": {"type": "in_memory", "keys": open_keys}})
    passed_in = Keytools.from_mapping(document, kms=InMemoryKms(dict.fromkeys(keys, b"a key of 16 byte")))
    monkeypatch.setattr(worker_processes, "ProcessPoolExecutor", None)
    with command_line_processes(2):
        for other in (in_document, passed_in):
            assert other.verify_folder(encrypted).conforms


@pytest.mark.parametrize(
    ("place", "has_secrets"), [("/dev/fd/{}", True), ("/dev/fd/{}", False), ("/proc/self/fd/{}", True)]
)
def test_a_configuration_from_a_pipe_is_read_once(
    run,
    config: Path,
    folder: Path,
    tmp_path: Path,
    place: str,
    has_secrets: bool,
    started: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with `--config <(sops --decrypt config.yaml)`. Workers would find it empty, or wait forever."""
    text = config.read_text()
    if not has_secrets:
        for name, key in MASTER_KEYS.items():
            encoded = base64.b64encode(key).decode()
            monkeypatch.setenv(f"KEY_{name}", encoded)
            text = text.replace(encoded, f"'${{KEY_{name}}}'")
    reading, writing = os.pipe()
    os.write(writing, text.encode())
    os.close(writing)
    options = ("--config", place.format(reading), "--processes", 2)
    done = run("encrypt", folder, tmp_path / "out", *options)
    os.close(reading)
    assert done.exit_code == 0, done.output
    assert "Encrypted 3 files" in done.stdout
    assert started == ([] if has_secrets else [2])


def test_a_configuration_from_a_named_pipe_is_read_once(
    run, config: Path, folder: Path, tmp_path: Path, started: list[Any]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(config.read_bytes(),), daemon=True)
    writer.start()
    done = run("encrypt", folder, tmp_path / "out", "--config", pipe, "--processes", 2)
    assert done.exit_code == 0, done.output
    assert "Encrypted 3 files" in done.stdout
    assert not started
    writer.join(60)


def test_a_configuration_from_stdin_is_read_once(
    program: list[str], config: Path, folder: Path, tmp_path: Path
) -> None:
    """Even if stdin is a file: a worker has another stdin. Paths are relative to the command's folder."""
    Path(tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "passphrase").touch(mode=0o600)
    (tmp_path / "keys" / "passphrase").write_text("canary horse battery")
    source = partial(passphrase_from_file, tmp_path / "keys" / "passphrase")
    Keystore.create(tmp_path / "keys" / "keystore.json", source, scrypt_n=2**14).create_key("footer")
    config.write_text(
        "version: 1\nkms: {type: keystore, path: keys/keystore.json, passphrase_file: keys/passphrase}\n"
        "tables: {people: {footer_key: footer, unlisted_columns: footer_key}}\n"
    )
    command = [*program, "encrypt", str(folder), "out", "--config", "/dev/stdin", "--processes", "2"]
    with config.open() as stdin:
        done = subprocess.run(command, stdin=stdin, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Encrypted 3 files" in done.stdout


@pytest.mark.usefixtures("warm_workers")
def test_the_audit_log_has_each_use_of_a_key(
    config: Path, many: Path, run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config.write_text(config.read_text().replace("type: in_memory", "type: in_memory\n  audit_log: true"))
    encrypted = tmp_path / "encrypted"
    assert run("encrypt", many, encrypted, "--config", config, "--processes", 2).exit_code == 0
    uses = [record for record in caplog.records if record.name == audit.LOGGER_NAME]
    # Each of three processes has its own KEKs.
    assert {record.process for record in uses} > {os.getpid()}
    assert len(uses) == 2 * len({record.process for record in uses}) <= 6
    assert {record.operation for record in uses} == {"wrap"}  # type: ignore[attr-defined]
    caplog.clear()
    assert data_set_verified(run, encrypted, config, 2)["verdict"] == "conforms, with weaknesses"
    uses = [record for record in caplog.records if record.name == audit.LOGGER_NAME]
    # A process that starts late may find nothing to do.
    assert 3 <= len(uses) <= 18
    assert {record.operation for record in uses} == {"unwrap"}  # type: ignore[attr-defined]
    assert all(record.subject.startswith(str(encrypted)) for record in uses)  # type: ignore[attr-defined]
    assert not logging.getLogger(audit.LOGGER_NAME).handlers


# --- what goes wrong in a worker ---


@pytest.fixture
def copying(tmp_path: Path, many: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts a program that copies `many` with two processes, after another file was put there."""

    def start(*names: str) -> subprocess.Popen[str]:
        (tmp_path / PIDS).mkdir()
        for name in names:
            shutil.copyfile(many / "year=0" / "0.parquet", many / "year=1" / f"{name}.parquet")
        here = str(Path(__file__).parents[2])
        # Workers find the function by the name of its module.
        program = f"import sys; sys.path.insert(0, {here!r}); from copying_program import main; main()"
        command = [sys.executable, "-c", program, str(many), str(tmp_path / "copies")]
        return subprocess.Popen(
            command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )

    return start


def assert_workers_end(tmp_path: Path) -> None:
    ids = [int(path.name) for path in (tmp_path / PIDS).iterdir()]
    # One may not have started.
    assert len(ids) >= 2
    end = time.monotonic() + 60
    while any(is_running(process_id) for process_id in ids):
        assert time.monotonic() < end
        time.sleep(0.02)


def is_running(process_id: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process_id}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(tmp_path: Path, *names: str) -> None:
    end = time.monotonic() + 60
    while not all((tmp_path / "copies" / "year=1" / f"{name}.begun").exists() for name in names):
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("killed", r"Error: a worker process was killed.* Each file that it was working on is whole"),
        ("full", r"Failed: .*full.parquet: no space left on device"),
        *([("refused", r"Failed: .*refused.parquet is not encrypted")] if SOAK else []),
    ],
)
def test_one_file_fails(copying, many: Path, tmp_path: Path, name: str, said: str) -> None:
    process = copying(name)
    stdout, stderr = process.communicate(timeout=90)
    assert process.returncode == 1
    assert re.search(said, stderr), stderr
    done = len(list((tmp_path / "copies").rglob("*.parquet")))
    if name == "refused":
        assert done == FILES and f"Copied {FILES} of {FILES + 1} files" in stdout
    else:
        assert not (tmp_path / "copies" / "year=1" / f"{name}.parquet").exists()
        # Work that a killed process did and did not report is not counted.
        pattern = (
            rf"(\d+) of {FILES + 1} files were copied before"
            if name == "killed"
            else rf"Copied (\d) of {FILES + 1}"
        )
        (reported,) = re.findall(pattern, stderr if name == "killed" else stdout)
        assert 1 <= int(reported) <= done
        assert name == "full" or (stdout == "" and "Continue with --skip-existing" in stderr)
    assert_workers_end(tmp_path)


def test_an_interruption_finishes_what_was_begun(copying, tmp_path: Path) -> None:
    """As from a terminal: the signal goes to all processes of the command."""
    process = copying("slow 1", "slow 2")
    wait_for(tmp_path, "slow 1", "slow 2")
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, ""), stderr
    assert stderr.splitlines()[-1] == "Interrupted."
    done = sorted(path.stem for path in (tmp_path / "copies").rglob("*.parquet"))
    assert {"slow 1", "slow 2"} <= set(done)
    assert stderr.startswith(f"{len(done)} of {FILES + 2} files were copied before this. Continue with --skip-ex")
    assert "Traceback" not in stderr
    assert_workers_end(tmp_path)


def test_sigterm_ends_all_processes(copying, tmp_path: Path) -> None:
    """As with `systemctl stop`: worker processes end in the middle of their files."""
    process = copying("slowest 1", "slowest 2")
    wait_for(tmp_path, "slowest 1", "slowest 2")
    os.killpg(process.pid, signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (143, ""), stderr
    assert stderr.splitlines()[-1] == "Terminated." and "Continue with --skip-existing" in stderr
    assert "Traceback" not in stderr
    assert_workers_end(tmp_path)
    assert not list((tmp_path / "copies").rglob("slow*.parquet"))


def test_a_second_interruption_waits_for_no_file(copying, tmp_path: Path) -> None:
    process = copying("slowest 1", "slowest 2")
    wait_for(tmp_path, "slowest 1", "slowest 2")
    stderr = ""
    for _ in range(30):
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            _, stderr = process.communicate(timeout=2)
            break
    # Shells show that as 130, too.
    assert process.returncode == -signal.SIGINT, stderr
    assert "Traceback" not in stderr
    assert_workers_end(tmp_path)
    assert not list((tmp_path / "copies").rglob("slow*.parquet"))


def test_workers_end_with_their_parent(copying, tmp_path: Path) -> None:
    process = copying("slowest 1", "slowest 2")
    wait_for(tmp_path, "slowest 1", "slowest 2")
    process.kill()
    process.wait(60)
    assert_workers_end(tmp_path)
    assert not list((tmp_path / "copies").rglob("slow*.parquet"))


def test_one_process_is_enough_for_few_files(
    run, config: Path, many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_processes, "ProcessPoolExecutor", None)
    for command in (
        ("encrypt", many, tmp_path / "e"),
        ("verify", tmp_path / "e"),
        ("decrypt", tmp_path / "e", tmp_path / "d"),
    ):
        assert run(*command, "--config", config).exit_code == 0
    assert run("encrypt", many, tmp_path / "o", "--config", config, "--processes", 1).exit_code == 0
    assert (
        json.loads(run("verify", tmp_path / "o", "--config", config, "--json").stdout)["verdict"]
        == "conforms, with weaknesses"
    )


def test_a_killed_process_ends_verify(run, config: Path, many: Path, tmp_path: Path) -> None:
    assert run("encrypt", many, tmp_path / "e", "--config", config, "--processes", 1).exit_code == 0
    thread = let_a_worker_die_at_work()
    outcome = run("verify", tmp_path / "e", "--config", config, "--processes", 2)
    thread.join()
    assert outcome.exit_code == 1
    assert "Error: a worker process was killed" in outcome.stderr and "--processes" in outcome.stderr
    assert outcome.stdout == ""


def test_what_a_killed_process_left_is_encrypted_by_the_next_run(
    run, config: Path, many: Path, tmp_path: Path, table: pa.Table
) -> None:
    encrypted = tmp_path / "e"
    thread = let_a_worker_die_at_work()
    outcome = run("encrypt", many, encrypted, "--config", config, "--processes", 2)
    thread.join()
    assert outcome.exit_code == 1 and outcome.stdout == ""
    assert f"of {FILES} files were encrypted before this. Continue with --skip-existing" in outcome.stderr
    outcome = run("encrypt", many, encrypted, "--config", config, "--processes", 1, "--skip-existing")
    assert outcome.exit_code == 0, outcome.stderr
    assert Keytools.from_yaml(config).read_table(encrypted).num_rows == FILES * table.num_rows
    assert Keytools.from_yaml(config).verify_folder(encrypted).conforms


@pytest.mark.usefixtures("warm_workers")
def test_a_configuration_that_changes_ends_the_command(
    run, config: Path, many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers would read another configuration in its place."""
    load = loader.load_configuration

    def load_and_change(path: Path) -> Any:
        configuration = load(path)
        config.write_text("version: 1")
        return configuration

    monkeypatch.setattr(loader, "load_configuration", load_and_change)
    text = config.read_text()
    done = run("encrypt", many, tmp_path / "e", "--config", config, "--processes", 2)
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr.count("the configuration changed after it was sent to this process. Start again.") == 1
    config.write_text(text)
    assert Keytools.from_yaml(config).verify_folder(tmp_path / "e").conforms


@pytest.mark.parametrize("number", [0, -1])
def test_a_number_of_processes_is_one_or_more(run, config: Path, many: Path, tmp_path: Path, number: int) -> None:
    """No work begins."""
    for command in (("verify", many), ("rekey", many, "--in-place"), ("encrypt", many, tmp_path / "e")):
        assert run(*command, "--config", config, "--processes", number).exit_code == 2
    assert not (tmp_path / "e").exists()
