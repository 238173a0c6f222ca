"""`serve` and `mount`: what they print, what they refuse, and how they end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from soak import SOAK
from unit.cli.conftest import CONFIGURATION, PROGRAM
from unit.serve.serving import memory_files, opened_by, tree_of

from parquet_keytools import Keytools
from parquet_keytools.cli.serve import viewed_tree
from parquet_keytools.errors import KmsAccessDeniedError, KmsUnavailableError
from parquet_keytools.serve import fuse_mount
from parquet_keytools.serve.served_tree import ServedTree

TABLE = pa.table({"id": list(range(1_000)), "name": [f"person {number}" for number in range(1_000)]})


@cache
def long_table(word: str) -> pa.Table:
    return pa.table({"name": [f"{word}-{number:09}" for number in range(200_000)]})


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "people.yaml"
    path.touch(mode=0o600)
    path.write_text(CONFIGURATION)
    (tmp_path / "people").mkdir()
    Keytools.from_yaml(path).write_table(TABLE, tmp_path / "people" / "a.parquet")
    return path


@contextlib.contextmanager
def serving(*arguments: object) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """Run `serve --json` until the block ends, and return what it prints."""
    command = [*PROGRAM, "serve", *map(str, arguments), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    try:
        lines = iter(process.stdout.readline, b"")
        text = b""
        for line in lines:
            text += line
            if line == b"}\n":
                break
        yield process, json.loads(text)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        assert process.stderr is not None
        process.stderr.close()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT] if SOAK else [signal.SIGTERM])
def test_it_serves_until_a_signal_comes(config: Path, tmp_path: Path, sent: signal.Signals) -> None:
    log = tmp_path / "access.jsonl"
    arguments = (tmp_path / "people", "--config", config, "--s3", "--access-log", log)
    with serving(*arguments) as (process, facts):
        with urllib.request.urlopen(facts["url"] + "a.parquet") as answer:
            assert pq.read_table(pa.BufferReader(answer.read())).equals(TABLE)
        assert set(facts["s3"]) == {"endpoint", "bucket", "access_key_id", "secret_access_key"}
        process.send_signal(sent)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 0
        assert errors.endswith(b"Stopped.\n") and b"Traceback" not in errors
        # Logs keep what is on stderr.
        token = facts["url"].split("/")[3]
        assert token.encode() not in errors and facts["s3"]["secret_access_key"].encode() not in errors
    (line,) = [json.loads(line) for line in log.read_text().splitlines()]
    assert (line["key"], line["status"], line["outcome"]) == ("a.parquet", 200, "ok")
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert facts["s3"]["secret_access_key"] not in log.read_text()


def test_lines_to_paste(config: Path, tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("parquet_keytools.cli.serve._wait", stop)
    done = run("serve", tmp_path / "people", "--config", config, "--s3")
    assert done.exit_code == 0
    (url,) = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("URL ")]
    lines = [line for line in done.stdout.splitlines() if line.startswith(("DuckDB", "Polars", "ClickHouse"))]
    assert len(lines) == 6
    assert f"select * from '{url}a.parquet';" in lines[0]
    assert url.split("/")[3] not in done.stderr
    assert done.stdout.startswith("Serving until Ctrl-C. Anyone with this URL")


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--address", "0.0.0.0"], 2, "with --host-name"),
        (["--address", "192.0.2.1"], 2, "decrypted data would be sent without encryption"),
        (["--address", "0.0.0.0", "--host-name", "x"], 2, "decrypted data would be sent without encryption"),
        (["--address", "localhost"], 2, "not an IP address"),
        (["--tls-key", "key.pem"], 2, "go together"),
        (["--tls-key", "key.pem", "--tls-certificate", "none.pem"], 2, "none.pem: No such file"),
        (
            ["--tls-key", "people.yaml", "--tls-certificate", "people.yaml"],
            2,
            "key do not match",
        ),
        (["--port", "65536"], 2, "65535"),
        (["--table", "other"], 2, "other"),
    ],
)
def test_what_is_refused(
    config: Path,
    tmp_path: Path,
    run,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    status: int,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("serve", "people", "--config", config, *arguments)
    assert done.exit_code == status
    assert text in " ".join(done.stderr.split())


def test_a_port_that_another_program_has(config: Path, tmp_path: Path, run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run("serve", tmp_path / "people", "--config", config, "--port", port)
    assert (done.exit_code, done.stdout) == (2, "")
    assert " ".join(done.stderr.split()) == (
        f"Error: the server cannot listen on 127.0.0.1:{port}: Address already in use. "
        "Choose another --port, 0 is a free one, or another --address."
    )


def test_nothing_to_serve(config: Path, tmp_path: Path, run) -> None:
    (tmp_path / "empty").mkdir()
    assert "there is no file or folder" in run("serve", tmp_path / "none", "--config", config).stderr
    done = run("serve", tmp_path / "empty", "--config", config)
    assert (done.exit_code, "no Parquet files" in done.stderr) == (1, True)


def test_one_file_is_served_without_those_beside_it(config: Path, tmp_path: Path) -> None:
    keytools = Keytools.from_yaml(config)
    keytools.write_table(TABLE, tmp_path / "people" / "b.parquet")
    tree, first = viewed_tree(keytools, str(tmp_path / "people" / "b.parquet"), None)
    assert first == "b.parquet"
    assert [entry.key for entry in tree.entries("")] == ["b.parquet"]
    with pytest.raises(FileNotFoundError):
        tree.find("a.parquet")


# --- mount ---


def can_mount() -> bool:
    """Whether libfuse is installed, and the device can be opened."""
    try:
        import mfusepy  # noqa: F401

        os.close(os.open("/dev/fuse", os.O_RDWR))
    except (ImportError, OSError):
        return False
    return True


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT] if SOAK else [signal.SIGINT])
def test_mount_shows_plain_files_or_says_what_is_missing(
    config: Path, tmp_path: Path, sent: signal.Signals
) -> None:
    keytools = Keytools.from_yaml(config)
    for name in ("altered", "replaced"):
        keytools.write_table(long_table("FIRST"), tmp_path / "people" / f"{name}.parquet", compression="none")
    altered = tmp_path / "people" / "altered.parquet"
    content = bytearray(altered.read_bytes())
    content[len(content) // 2] ^= 1
    altered.write_bytes(content)
    folder = tmp_path / "mounted"
    folder.mkdir()
    command = [*PROGRAM, "mount", str(tmp_path / "people"), str(folder), "--config", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first = process.stdout.readline()
    if not first:
        _, errors = process.communicate(timeout=30)
        assert (process.returncode, can_mount()) == (2, False), errors
        assert errors.startswith("Error: ") and "Traceback" not in errors
        return
    try:
        assert first == f"Mounted at {folder} until Ctrl-C or umount.\n"
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(pq.read_table, [folder / "a.parquet"] * 32))
        assert all(table.equals(TABLE) for table in found)
        assert pq.read_table(folder / "a.parquet", memory_map=True).equals(TABLE)
        names = ["a.parquet", "altered.parquet", "replaced.parquet"]
        assert sorted(entry.name for entry in folder.iterdir()) == names
        with pytest.raises(OSError, match="Input/output error"):
            (folder / "altered.parquet").read_bytes()
        with (folder / "replaced.parquet").open("rb", buffering=0) as former:
            begin = former.read(4096)
            keytools.write_table(long_table("OTHER"), tmp_path / "people" / "replaced.parquet", compression="none")
            with (folder / "replaced.parquet").open("rb", buffering=0) as latter:
                assert latter.read(4) == begin[:4] == b"PAR1"
                assert b"OTHER" in latter.read(2_000_000)
            former.seek(1_000_000)
            with contextlib.suppress(OSError):
                # From the former file, out of the cache, or nothing.
                assert b"OTHER" not in former.read(500_000)
        with pytest.raises(OSError, match="Read-only file system"):
            (folder / "b.parquet").write_bytes(b"")
        assert not (folder / "none").exists()
    finally:
        process.send_signal(sent)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert all(" is not read: " in line for line in errors.splitlines()), errors
    assert not folder.is_mount()


def archived_by_tar(source: Path, target: Path) -> None:
    for form in ("raw", "seek"):
        archive = target.with_suffix(f".{form}.tar")
        tar = ["tar", "--sparse", f"--hole-detection={form}"]
        subprocess.run([*tar, "-cf", archive, "-C", source, "."], check=True)
        target.mkdir(exist_ok=True)
        subprocess.run(["tar", "-xf", archive, "-C", target], check=True)


def copied_by_cp(source: Path, target: Path) -> None:
    for form in ("auto", "always"):
        subprocess.run(["cp", "-rT", f"--sparse={form}", source, target], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="the programs of GNU")
@pytest.mark.parametrize("copied", [archived_by_tar, copied_by_cp] if SOAK else [archived_by_tar])
def test_programs_copy_a_mounted_folder_whole(
    program: list[str], config: Path, tmp_path: Path, copied: Any
) -> None:
    source = tmp_path / "people"
    (source / "part").mkdir()
    keytools = Keytools.from_yaml(config)
    for name in ("b.parquet", "part/c.parquet"):
        keytools.write_table(long_table("FIRST"), source / name, compression="none")
    (source / "link.parquet").hardlink_to(source / "b.parquet")
    names = ["a.parquet", "b.parquet", "link.parquet", "part/c.parquet"]
    for junk in ("_SUCCESS", ".a.parquet.crc", "part/notes.txt"):
        (source / junk).write_text("junk")
    with mounted(program, config, source, tmp_path / "mounted") as folder:
        if folder is None:
            return
        copied(folder, tmp_path / "copy")
        assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*.parquet")) == names
        for name in names:
            found, local = (folder / name).stat(), (source / name).stat()
            assert found.st_blocks * 512 >= found.st_size > 0
            assert (abs(found.st_mtime_ns - local.st_mtime_ns) < 2_000, found.st_nlink) == (True, 1)
        with (folder / "b.parquet").open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == size
            assert os.lseek(file.fileno(), size // 2, os.SEEK_DATA) == size // 2
    for name in names:
        expected = keytools.open(source / name).read()
        assert (tmp_path / "copy" / name).read_bytes() == expected


@contextlib.contextmanager
def mounted(program: list[str], config: Path, source: Path, folder: Path) -> Iterator[Path | None]:
    """Mount a folder; yield None on a machine that cannot mount."""
    folder.mkdir()
    command = [*program, "mount", str(source), str(folder), "--config", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        is_mounted = bool(process.stdout.readline())
        assert is_mounted == can_mount()
        yield folder if is_mounted else None
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


def test_a_mounted_file_has_what_a_local_one_has(program: list[str], config: Path, tmp_path: Path) -> None:
    source = tmp_path / "people"
    (source / "empty.parquet").touch()
    (source / "part").mkdir()
    os.utime(source / "a.parquet", ns=(1_700_000_000_123_456_789, 1_600_000_000_987_654_321))
    (source / "short.parquet").write_bytes(b"PARE")
    view = Keytools.from_yaml(config).view(source)
    tree = fuse_mount.MountedTree(ServedTree(view, folder=source), lambda: None)
    for name in ("a", "empty", "short"):
        found, local = tree.getattr(f"/{name}.parquet"), (source / f"{name}.parquet").stat()
        assert found["st_blocks"] * 512 >= found["st_size"] > (found["st_blocks"] - 8) * 512
        assert found["st_blksize"] == 4096
        assert abs(found["st_mtime"] - local.st_mtime_ns) < 2_000
        assert found["st_nlink"] == 1
    for folder in ("/", "/part"):
        # Not 2, as for a folder without subfolders: older versions of `find`, and Perl's, would look for none.
        assert tree.getattr(folder)["st_nlink"] == 1


def test_a_mounted_object_has_blocks_and_a_time() -> None:
    tree = fuse_mount.MountedTree(tree_of(memory_files({"part/a": b"1" * 4097, "b": b""})), lambda: None)
    assert [tree.getattr(f"/{name}")["st_blocks"] for name in ("part/a", "b", "part")] == [16, 0, 0]
    now = time.time_ns()
    for name in ("part/a", "b", "part"):
        found = tree.getattr(f"/{name}")
        assert found["st_nlink"] == 1
        assert now - 60e9 < found["st_mtime"] <= now + 60e9


def test_without_libfuse_there_is_one_clear_error(
    config: Path, tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mounted").mkdir()
    arguments = ("mount", tmp_path / "people", tmp_path / "mounted", "--config", config)
    monkeypatch.setitem(sys.modules, "mfusepy", None)
    done = run(*arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("Error: mfusepy is not installed. Install")
    # As mfusepy fails if it finds no library.
    (tmp_path / "mfusepy.py").write_text("raise OSError('Unable to find libfuse')\n")
    monkeypatch.delitem(sys.modules, "mfusepy")
    monkeypatch.syspath_prepend(tmp_path)
    done = run(*arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("Error: libfuse is not installed. On Debian")


def test_a_folder_that_is_not_empty_is_not_mounted_over(config: Path, tmp_path: Path, run) -> None:
    done = run("mount", tmp_path / "people", tmp_path / "people", "--config", config)
    assert (done.exit_code, "not empty" in done.stderr) == (2, True)


def test_what_the_kernel_is_answered(config: Path, tmp_path: Path) -> None:
    keytools = Keytools.from_yaml(config)
    whole = keytools.open(tmp_path / "people" / "a.parquet").read()
    tree = ServedTree(keytools.view(tmp_path / "people"), folder=tmp_path / "people")
    mounted = fuse_mount.MountedTree(tree, lambda: None)
    assert mounted.getattr("/")["st_mode"] == stat.S_IFDIR | 0o500
    facts = mounted.getattr("/a.parquet")
    assert (facts["st_mode"], facts["st_size"]) == (stat.S_IFREG | 0o400, len(whole))
    with pytest.raises(OSError, match="No such file"):
        mounted.getattr("/../people.yaml")
    with pytest.raises(OSError, match="Read-only"):
        opened_by(mounted, "/a.parquet", os.O_RDWR)
    handle = opened_by(mounted, "/a.parquet")
    assert mounted.read("/a.parquet", 50, 10, handle) == whole[10:60]
    assert mounted.read("/a.parquet", 50, len(whole) - 5, handle) == whole[-5:]
    assert mounted.read("/a.parquet", 50, len(whole) + 5, handle) == b""
    content = bytearray((tmp_path / "people" / "a.parquet").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "people" / "a.parquet").write_bytes(content)
    with pytest.raises(OSError, match="Stale"):
        mounted.read("/a.parquet", 500, 0, handle)
    # Cached pages of the open file are not mixed with the other file.
    other = opened_by(mounted, "/a.parquet")
    assert (handle.direct_io, other.direct_io) == (False, True)
    with pytest.raises(OSError, match="Input/output error"):
        mounted.read("/a.parquet", len(whole), 0, other)
    mounted.release("/a.parquet", handle)
    assert not opened_by(mounted, "/a.parquet").direct_io
    mounted.release("/a.parquet", other)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KmsAccessDeniedError("no", backend="x", operation="unwrap", master_key_id="k"), "Permission denied"),
        (KmsUnavailableError("no", backend="x", operation="unwrap", master_key_id="k"), "Input/output error"),
        (TimeoutError("s3cr3t"), "Input/output error"),
        (RuntimeError("s3cr3t"), "Input/output error"),
    ],
)
def test_what_fails_is_an_error_of_the_file(
    tmp_path: Path, error: Exception, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise error

    tree = tree_of(memory_files({"a": b"1"}))
    mounted = fuse_mount.MountedTree(tree, lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "find", fail)
        with pytest.raises(OSError, match=text):
            opened_by(mounted, "/a")
    assert "'/a' is not read: " in caplog.text and "s3cr3t" not in caplog.text
