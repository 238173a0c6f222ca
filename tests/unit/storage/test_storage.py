import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from pyarrow import fs as pafs

from parquet_keytools.errors import OutputError, ParquetFormatError
from parquet_keytools.storage.locations import ArrowSource, BufferSource, FileLocation, open_source, read_whole
from parquet_keytools.storage.outputs import (
    StreamSink,
    discarded_unless_done,
    pending_output,
    whole_output,
    write_whole,
)

# --- resolve ---


def local(path: str | Path, filesystem: object = None) -> FileLocation:
    location = FileLocation.resolve(path, filesystem)
    assert location.is_local
    return location


def test_path_objects_and_texts(tmp_path: Path) -> None:
    assert local(tmp_path / "x").path == local(str(tmp_path / "x")).path == str(tmp_path / "x")


def test_relative_paths_start_at_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And stay where they were resolved: a later chdir, as workers do, must not move them."""
    monkeypatch.chdir(tmp_path)
    location = local("folder/x")
    monkeypatch.chdir("/")
    assert location.path == str(tmp_path / "folder" / "x")


def test_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local("~/x").path == str(tmp_path / "x")


def test_a_name_with_a_tilde_is_no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert FileLocation.resolve("~no such user.parquet").path == str(tmp_path / "~no such user.parquet")


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)
    with pytest.raises(
        FileNotFoundError, match=r"no home folder: set HOME, or write the whole path.*'~/x\.parquet'"
    ):
        FileLocation.resolve("~/x.parquet")


def test_a_name_that_is_too_long_is_that_of_nothing(tmp_path: Path) -> None:
    assert FileLocation.resolve(tmp_path / ("x" * 300)).info().type is pafs.FileType.NotFound


def test_file_uri(tmp_path: Path) -> None:
    assert local(f"file://{tmp_path}/a%20b").path == f"{tmp_path}/a b"


@pytest.mark.parametrize("uri", ["file://user:canary@/tmp/new", "file://host/new", "local://new", "file://new/x"])
def test_a_local_uri_with_a_host_is_no_relative_path(uri: str) -> None:
    with pytest.raises(ValueError, match="names no host") as caught:
        FileLocation.resolve(uri)
    assert "canary" not in str(caught.value)


def test_uri_of_another_file_system() -> None:
    location = FileLocation.resolve("mock:///folder/x.parquet")
    assert not location.is_local and location.path == "folder/x.parquet"
    assert str(location) == "mock:folder/x.parquet"


def test_unknown_scheme() -> None:
    """pyarrow's own error quotes the URI."""
    with pytest.raises(ValueError, match="nosuch") as caught:
        FileLocation.resolve("nosuch://user:secret@bucket/x")
    assert "secret" not in str(caught.value) and caught.value.__cause__ is None


def test_sub_tree_of_the_local_file_system_is_local(tmp_path: Path) -> None:
    """Otherwise, a file would be written without fsync, and not be mapped for reading."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    tree = pafs.SubTreeFileSystem(str(tmp_path / "a"), pafs.LocalFileSystem())
    nested = pafs.SubTreeFileSystem("b", tree)
    assert local("x", tree).path == local("/x", tree).path == str(tmp_path / "a" / "x")
    assert local("x", nested).path == str(tmp_path / "a" / "b" / "x")


def test_sub_tree_of_another_file_system() -> None:
    memory = pafs._MockFileSystem()
    memory.create_dir("base")
    location = FileLocation.resolve("x", pafs.SubTreeFileSystem("base", memory))
    assert (location.filesystem, location.path) == (memory, "base/x")


def test_a_tilde_in_a_sub_tree_is_a_name(tmp_path: Path) -> None:
    tree = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    assert local("~/x", tree).path == str(tmp_path / "~" / "x")


def test_fsspec(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    location = FileLocation.resolve(str(tmp_path / "x"), fsspec.filesystem("file"))
    write_whole(location, b"data")
    assert (tmp_path / "x").read_bytes() == b"data"


def test_file_systems_of_arrow_that_other_processes_see(tmp_path: Path) -> None:
    assert local(tmp_path / "x").is_for_all_processes
    assert FileLocation(pafs.S3FileSystem(anonymous=True, region="x"), "x").is_for_all_processes
    assert not FileLocation.resolve("mock:///x").is_for_all_processes
    in_memory = pafs.SubTreeFileSystem("/x", pafs.PyFileSystem(pafs.FSSpecHandler(fsspec.filesystem("memory"))))
    assert not FileLocation.resolve("x", in_memory).is_for_all_processes


def test_a_location_stays_what_it_is(tmp_path: Path) -> None:
    location = local(tmp_path / "x")
    assert FileLocation.resolve(location) is location


def test_links_that_lead_to_themselves_are_two_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).symlink_to(name)
    assert not FileLocation.resolve(tmp_path / "a").is_same_file(FileLocation.resolve(tmp_path / "b"))
    assert FileLocation.resolve(tmp_path / "a").is_same_file(FileLocation.resolve(tmp_path / "a"))


def test_siblings_and_children(tmp_path: Path) -> None:
    location = local(tmp_path / "x.parquet")
    assert location.name == "x.parquet"
    assert location.sibling("y").path == str(tmp_path / "y")
    assert local(tmp_path).below("y").path == str(tmp_path / "y")


# --- ranges ---


@pytest.fixture(params=["mapped", "arrow", "bytes", "buffer"])
def source(request: pytest.FixtureRequest, tmp_path: Path):
    (tmp_path / "x").write_bytes(b"0123456789")
    if request.param == "mapped":
        with open_source(local(tmp_path / "x")) as opened:
            yield opened
    elif request.param == "arrow":
        filesystem = pafs._MockFileSystem()
        with filesystem.open_output_stream("x") as stream:
            stream.write(b"0123456789")
        with open_source(FileLocation(filesystem, "x")) as opened:
            yield opened
    else:
        data = b"0123456789"
        yield BufferSource("x", data if request.param == "bytes" else pa.py_buffer(data))


def test_reads_ranges(source) -> None:
    assert source.size_bytes == 10
    assert bytes(source.read_at(0, 10)) == b"0123456789"
    assert bytes(source.read_at(3, 4)) == b"3456"
    assert bytes(source.read_at(10, 0)) == b""


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, 11), (10, 1), (5, -1), (2**63, 1), (0, 2**63)])
def test_ranges_outside_are_refused(source, offset: int, length: int) -> None:
    """Python slices accept negative and too large numbers silently."""
    with pytest.raises(ParquetFormatError, match="outside of the file"):
        source.read_at(offset, length)


def test_a_file_that_became_shorter() -> None:
    file = pa.BufferReader(b"01234")
    with pytest.raises(ParquetFormatError, match="ends early"):
        ArrowSource("x", file, 10).read_at(0, 10)


def test_an_empty_file(tmp_path: Path) -> None:
    """It cannot be mapped."""
    (tmp_path / "x").touch()
    with open_source(local(tmp_path / "x")) as opened:
        assert opened.size_bytes == 0 and bytes(opened.read_at(0, 0)) == b""


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), open_source(local(tmp_path / "x")):
        pass


def test_a_view_may_outlive_the_file(tmp_path: Path) -> None:
    """A traceback may hold one; reading it after the map was closed would be a segmentation fault."""
    (tmp_path / "x").write_bytes(b"0123456789")
    with open_source(local(tmp_path / "x")) as opened:
        view = opened.read_at(0, 10)
    assert bytes(view) == b"0123456789"


def test_read_whole_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"0123456789")
    assert read_whole(local(tmp_path / "x"), 10) == b"0123456789"
    with pytest.raises(ParquetFormatError, match="longer than 9 bytes"):
        read_whole(local(tmp_path / "x"), 9)


# --- sinks ---


def test_local_sink_takes_any_order(tmp_path: Path) -> None:
    with whole_output(local(tmp_path / "x")) as pending, pending.open_sink() as sink:
        assert sink.takes_any_order
        sink.reserve(6)
        sink.write_at(3, b"def")
        sink.write_at(0, b"abc")
    assert (tmp_path / "x").read_bytes() == b"abcdef"


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pwrite may write less than requested, and always does at 2 GiB."""
    pwrite = os.pwrite
    monkeypatch.setattr("os.pwrite", lambda fd, data, offset: pwrite(fd, data[:3], offset))
    write_whole(local(tmp_path / "x"), b"0123456789")
    assert (tmp_path / "x").read_bytes() == b"0123456789"


def test_a_stream_is_written_in_order() -> None:
    stream = pa.BufferOutputStream()
    sink = StreamSink(stream)
    assert not sink.takes_any_order
    sink.write_at(0, b"ab")
    with pytest.raises(OutputError, match="written at 5 instead of 2"):
        sink.write_at(5, b"x")
    sink.write_at(2, b"cd")
    assert stream.getvalue().to_pybytes() == b"abcd"


@pytest.mark.parametrize("read", [lambda location: read_whole(location, 10), lambda location: _opened(location)])
def test_a_pipe_is_refused_and_not_waited_for(read, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ParquetFormatError, match="pipe: it is not a regular file"):
        read(local(tmp_path / "pipe"))
    with pytest.raises(ParquetFormatError, match="/dev/null: it is not a regular file"):
        read(local("/dev/null"))


def _opened(location: FileLocation) -> None:
    with open_source(location):
        pass


def test_a_folder_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        _opened(local(tmp_path))


# --- whole outputs ---


class Interrupted(BaseException):
    """Like Ctrl-C, it is no Exception."""


def mock_filesystem() -> pafs.FileSystem:
    return pafs._MockFileSystem()


@pytest.fixture(params=["local", "other"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> FileLocation:
    if request.param == "local":
        return local(tmp_path / "x")
    return FileLocation(mock_filesystem(), "x")


def content(location: FileLocation) -> bytes | None:
    if location.info().type == pafs.FileType.NotFound:
        return None
    return read_whole(location, 1000)


def folder_of(location: FileLocation) -> list[str]:
    base = str(Path(location.path).parent) if location.is_local else ""
    return [info.base_name for info in location.filesystem.get_file_info(pafs.FileSelector(base))]


def test_appears_when_complete(target: FileLocation) -> None:
    with whole_output(target) as pending:
        with pending.open_sink() as sink:
            sink.write_at(0, b"data")
        assert content(target) is None
        assert all(name.startswith(".") for name in folder_of(target)), "data sets would read the temporary file"
    assert content(target) == b"data"
    assert folder_of(target) == ["x"]


@pytest.mark.parametrize("error", [Interrupted(), KeyboardInterrupt(), PermissionError(13, "no"), ValueError()])
@pytest.mark.parametrize("existing", [None, b"original"])
def test_a_failure_leaves_what_was_there(
    target: FileLocation, existing: bytes | None, error: BaseException
) -> None:
    if existing is not None:
        write_whole(target, existing)
    with pytest.raises(type(error)), whole_output(target) as pending, pending.open_sink() as sink:
        sink.write_at(0, b"half")
        raise error
    assert content(target) == existing
    assert folder_of(target) == ([] if existing is None else ["x"])


@pytest.mark.parametrize("failing", ["os.fsync", "os.replace"])
def test_a_failure_of_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    """A disk may report only at fsync that it is full."""
    target = local(tmp_path / "x")
    write_whole(target, b"original")

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OutputError, match="x cannot be written: no space"):
        patch.setattr(failing, fail)
        write_whole(target, b"new")
    assert content(target) == b"original" and folder_of(target) == ["x"]


def test_a_full_disk_is_noticed_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OutputError, match="no space"), whole_output(local(tmp_path / "x")) as pending:
        with pending.open_sink() as sink:
            sink.reserve(10)
        pytest.fail("went on")
    assert list(tmp_path.iterdir()) == []


def test_limit_of_the_file_size(tmp_path: Path) -> None:
    """A real error of the operating system, like ENOSPC, in a process whose files may have 1,000 bytes."""
    program = (
        "import resource, signal, sys\n"
        "from parquet_keytools.storage.locations import FileLocation\n"
        "from parquet_keytools.storage.outputs import write_whole\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "write_whole(FileLocation.resolve(sys.argv[1]), b'x' * 5000)\n"
    )
    (tmp_path / "x").write_bytes(b"original")
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "x")], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 1 and "x cannot be written: file too large" in run.stderr, run.stderr
    assert (tmp_path / "x").read_bytes() == b"original"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_the_data_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash, a name without data would replace the original."""
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        place = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        steps.append("sync folder" if place == str(tmp_path) else "sync data")
        fsync(descriptor)

    def replaced(*names: Any, **folders: int) -> None:
        steps.append("replace")
        replace(*names, **folders)

    monkeypatch.setattr("os.fsync", synced)
    monkeypatch.setattr("os.replace", replaced)
    write_whole(local(tmp_path / "x"), b"data")
    assert steps == ["sync data", "replace", "sync folder"]


def test_checksums_of_hadoop_go_with_what_they_are_of(tmp_path: Path) -> None:
    """Otherwise, Spark refuses the new file."""
    checksums = tmp_path / ".x.crc"
    for content, stays in ((b"crc\x00\x00\x00\x02\x00abcd", False), (b"somebody's own", True), (b"", True)):
        checksums.write_bytes(content)
        write_whole(local(tmp_path / "x"), b"data")
        assert checksums.exists() == stays
    write_whole(local(tmp_path / "y"), b"data")
    assert checksums.exists()


def test_the_target_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="is a folder"):
        write_whole(local(tmp_path), b"data")


def test_the_folder_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="does not exist"):
        write_whole(local(tmp_path / "folder" / "x"), b"data")


def test_two_writers_at_a_time(tmp_path: Path) -> None:
    """Both write under their own names; the last one wins, with a complete file."""
    target = local(tmp_path / "x")
    with whole_output(target) as first, whole_output(target) as second:
        for pending, data in ((first, b"first"), (second, b"second")):
            with pending.open_sink() as sink:
                sink.write_at(0, data)
    assert content(target) == b"first" and folder_of(target) == ["x"]


# --- permissions ---


def permissions(path: str | Path) -> int:
    return Path(path).stat().st_mode & 0o777


@pytest.fixture
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("usual_umask")
@pytest.mark.parametrize("existing", [0o600, 0o640, 0o664, 0o400])
def test_a_file_that_is_there_keeps_its_permissions(tmp_path: Path, existing: int) -> None:
    (tmp_path / "x").touch()
    (tmp_path / "x").chmod(existing)
    with whole_output(local(tmp_path / "x")) as pending, pending.open_sink() as sink:
        sink.write_at(0, b"data")
        assert os.fstat(sink.file_descriptor).st_mode & ~existing & 0o077 == 0, "others could read it meanwhile"
    assert permissions(tmp_path / "x") == existing
    assert (tmp_path / "x").read_bytes() == b"data"


@pytest.mark.usefixtures("usual_umask")
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666, 0o400])
@pytest.mark.parametrize("existing", [None, 0o666])
def test_a_mode_that_is_given_counts(tmp_path: Path, mode: int, existing: int | None) -> None:
    if existing is not None:
        (tmp_path / "x").touch()
        (tmp_path / "x").chmod(existing)
    with discarded_unless_done(pending_output(local(tmp_path / "x"), mode=mode)) as pending:
        with pending.open_sink() as sink:
            assert os.fstat(sink.file_descriptor).st_mode & 0o777 == 0o600
        pending.commit()
    assert permissions(tmp_path / "x") == mode


@pytest.mark.usefixtures("usual_umask")
def test_a_new_file_has_the_usual_permissions(tmp_path: Path) -> None:
    write_whole(local(tmp_path / "x"), b"data")
    assert permissions(tmp_path / "x") == 0o644
