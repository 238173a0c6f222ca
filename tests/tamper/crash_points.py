"""Commands in a process that ends at a chosen call to the file system, or gets an error there.

This is also a program: it imports everything once, and forks for each job that it reads from stdin, so that
hundreds of jobs take little time. Each call that changes something under the job's folder is a point.
"""

from __future__ import annotations

import errno
import gc
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Never

TESTS = Path(__file__).resolve().parents[1]
KILLED = 99

PATH_CALLS = ("rename", "replace", "unlink", "remove", "rmdir", "mkdir", "link", "symlink", "chmod", "utime")
"""Their first argument is a path or a file descriptor; for renames and links, the second one is the new path."""

DESCRIPTOR_CALLS = (
    "write",
    "pwrite",
    "fsync",
    "fdatasync",
    "ftruncate",
    "posix_fallocate",
    "fchmod",
    "fchown",
    "setxattr",
)
RENAMES = ("rename", "replace", "link")
"""Calls that put a file in its place."""

WRITES = ("write", "pwrite", "copy_file_range")
"""Calls that may stop halfway."""

TAKES_SPACE = (*WRITES, "open", "link", "posix_fallocate", "fsync", "mkdir", "ftruncate")
"""Calls that a full disk makes fail."""


@dataclass(frozen=True)
class Job:
    """What a process does, and where it ends.

    Attributes:
        action: Method of `Keytools`, or `command` for the command line.
        folder: The data set, or the folder to write to.
        keystore: Its KMS.
        settings: The table's settings.
        options: The method's options; for a command, its `arguments`.
        point: The call, counted from 1; 0 for none.
        mode: `kill` before the call, `after` right after it, `torn` after half of a write, `no_space` for an
            error instead of the call, `attack` for another user's attack before it.
        attack: The attack of that user: one of `other_users.ATTACKS`.
        user: Number of the user who does the job.
    """

    action: str
    folder: str
    keystore: str
    settings: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    point: int = 0
    mode: str = "kill"
    attack: str = ""
    user: int = 0


@dataclass(frozen=True)
class Ended:
    """The outcome of a job.

    Attributes:
        calls: Name of the call and path, for each point that was reached.
        killed: Whether it was killed at the point.
        failures: The failures in its report.
        error: Class name and text of the raised error.
        status: The command's exit status.
        text: The command's output.
    """

    calls: list[tuple[str, str]]
    killed: bool
    failures: list[str]
    error: str | None
    status: int | None = None
    text: str = ""


# --- in the process that is killed ---


class Points:
    """Counts calls, and executes the job's mode at one of them."""

    def __init__(self, job: Job, tell: Callable[[Ended], None]) -> None:
        self.job = job
        self.calls: list[tuple[str, str]] = []
        self._tell = tell
        self._root = os.path.realpath(job.folder)
        self._process_id = os.getpid()
        self.attacker: Any = None

    def watch(self) -> None:
        """Wrap each call."""
        for name in PATH_CALLS:
            setattr(
                os, name, self._wrapped(name, getattr(os, name), 1 if name in ("rename", "replace", "link") else 0)
            )
        for name in DESCRIPTOR_CALLS:
            setattr(os, name, self._wrapped(name, getattr(os, name), 0))
        os.copy_file_range = self._wrapped("copy_file_range", os.copy_file_range, 1)
        os.open = self._wrapped_open(os.open)
        sys.addaudithook(self._on_event)

    def filesystem(self) -> Any:
        """Return a local file system whose deletions are points: Arrow's own are not Python calls."""
        from pyarrow import fs as pafs

        points = self

        class Watched(pafs.LocalFileSystem):  # type: ignore[misc]
            def delete_file(self, path: str) -> None:
                points.at("unlink", path)
                super().delete_file(path)

        return Watched()

    def at(self, name: str, path: str, torn: Callable[[], object] | None = None) -> None:
        """Count a call, and be killed or raise at the chosen point."""
        if not os.path.realpath(path).startswith(self._root):
            return
        self.calls.append((name, os.path.relpath(path, self._root)))
        job = self.job
        if len(self.calls) == job.point and job.mode in ("kill", "torn"):
            if torn is not None and job.mode == "torn":
                torn()
            self._be_killed()
        if job.mode == "attack" and len(self.calls) == job.point:
            self.attacker.attack()
        if job.mode == "no_space" and job.point and len(self.calls) >= job.point and name in TAKES_SPACE:
            # The disk is full from now on; only deletions still work.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _be_killed(self) -> Never:
        self._tell(Ended(self.calls, True, [], None))
        os._exit(KILLED)

    def _wrapped(self, name: str, call: Callable[..., Any], position: int) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **named: Any) -> Any:
            torn = self._half(name, call, arguments) if name in WRITES else None
            folder = named.get("dst_dir_fd", named.get("dir_fd"))
            before = len(self.calls)
            self.at(name, _path_of(arguments[position], folder), torn)
            result = call(*arguments, **named)
            if self.job.mode == "after" and before < self.job.point == len(self.calls):
                self._be_killed()
            return result

        return wrapper

    @staticmethod
    def _half(name: str, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[[], object]:
        if name == "copy_file_range":
            source, target, count, *offsets = arguments
            return lambda: call(source, target, max(1, count // 2), *offsets)
        descriptor, data, *offset = arguments
        return lambda: call(descriptor, bytes(data)[: len(data) // 2], *offset)

    def _wrapped_open(self, call: Callable[..., int]) -> Callable[..., int]:
        def wrapper(path: Any, flags: int, *rest: Any, **named: Any) -> int:
            if flags & (os.O_CREAT | os.O_TRUNC) and not isinstance(path, int):
                self.at("open", _path_of(path, named.get("dir_fd")))
            return call(path, flags, *rest, **named)

        return wrapper

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        # Our code does not write through Python's file objects: such writes would not be points.
        if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
            path = arguments[0]
            if isinstance(path, (str, bytes)) and os.fsdecode(path).startswith(self._root):
                os._exit(3)


def _path_of(place: Any, folder: int | None = None) -> str:
    if isinstance(place, int):
        return os.readlink(f"/proc/self/fd/{place}")  # noqa: PTH115 - called often
    path = os.fsdecode(os.fspath(place))
    return path if folder is None else os.path.join(_path_of(folder), path)  # noqa: PTH118 - called often


class InOrder:
    """Replaces a thread pool, so that calls come in the same order each time."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> InOrder:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def map(self, function: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
        return map(function, *arguments)


def _open_stream(self: Any) -> Any:
    """Open a new file for Arrow so that its writes are calls of Python."""
    import pyarrow as pa

    with self._opened() as (_, descriptor):
        return pa.PythonFile(_RawFile(os.dup(descriptor)), mode="w")


class _RawFile(io.RawIOBase):
    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._length = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        written = 0
        while written < len(data):
            written += os.write(self._descriptor, memoryview(data)[written:])
        self._length += written
        return written

    def tell(self) -> int:
        return self._length

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()


def _in_order(function: Callable[[Any], Any], items: Sequence[Any], _threads: int) -> list[Any]:
    return [function(item) for item in items]


def run(job: Job, tell: Callable[[Ended], None]) -> None:
    """Do a job."""
    from crash_writers import WRITERS
    from rotation_case import Case, passphrase

    from parquet_keytools.files import placement
    from parquet_keytools.kms.keystore_file import KeystoreKms
    from parquet_keytools.rotation import data_set_run
    from parquet_keytools.storage import outputs

    data_set_run.ThreadPoolExecutor = InOrder  # type: ignore[assignment, misc]
    placement.in_threads = _in_order  # type: ignore[assignment]
    outputs.LocalOutput.open_stream = _open_stream  # type: ignore[method-assign]
    points, folder, keystore = Points(job, tell), Path(job.folder), Path(job.keystore)
    if job.action == "command":
        tell(_command(job, points))
        return

    def act(folder: Path) -> list[str]:
        tools = Case(folder, KeystoreKms(keystore, passphrase), None, job.settings).tools()
        if job.action in WRITERS:
            WRITERS[job.action](tools, keystore.with_name("source"), folder, points.filesystem(), job.options)
            return []
        report = getattr(tools, job.action)(folder, filesystem=points.filesystem(), **job.options)
        return [str(file.error) for file in report.failures]

    if job.attack:
        points.attacker = _attacker(job, act)
    points.watch()
    failures: list[str] = []
    error = None
    try:
        failures = act(folder)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    if points.attacker is not None:
        points.attacker.look()
    saw_values = points.attacker is not None and points.attacker.saw_values
    tell(Ended(points.calls, False, failures, error, text="values were seen" if saw_values else ""))


def _attacker(job: Job, act: Callable[[Path], object]) -> Any:
    """Become the user who does the job, while another process waits for it."""
    from other_users import PRIVATE, Attacker

    base = Path(job.folder).parent
    # The other user could not import anything later.
    act(base / "warm")
    attacker = Attacker(job.attack, Path(job.folder), base / PRIVATE)
    if job.user:
        os.setgroups([])
        os.setgid(job.user)
        os.setuid(job.user)
    return attacker


def _command(job: Job, points: Points) -> Ended:
    from typer.testing import CliRunner

    from parquet_keytools.cli import app

    points.watch()
    done = CliRunner().invoke(app, job.options["arguments"])
    unexpected = None if isinstance(done.exception, SystemExit | None) else repr(done.exception)
    return Ended(points.calls, False, [], unexpected, int(done.exit_code), done.stderr)


def main() -> None:
    """Fork for each job on stdin, and write its outcome to stdout."""
    import remembered_scrypt

    remembered_scrypt.install()

    # So that the children inherit them.
    import crash_writers  # noqa: F401
    import opentelemetry.metrics
    import opentelemetry.trace  # noqa: F401
    import pyarrow.dataset  # noqa: F401
    import rotation_case
    import typer.testing

    import parquet_keytools.cli
    import parquet_keytools.files.conversion
    import parquet_keytools.rotation.rekeying
    from parquet_keytools.kms.keystore_file import Keystore

    # Typer builds the whole tree of commands for each call of one.
    typer.testing._get_command = cache(typer.testing._get_command)
    typer.testing._get_command(parquet_keytools.cli.app)
    # Otherwise, the garbage collector of each child would copy the memory that it visits.
    gc.freeze()
    for line in sys.stdin:
        job = Job(**json.loads(line))
        # The children inherit the key that scrypt derived from the passphrase.
        Keystore(Path(job.keystore), rotation_case.passphrase).open()
        from_child, to_parent = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(from_child)
            write = os.write

            def tell(ended: Ended, write: Callable[..., int] = write, to_parent: int = to_parent) -> None:
                data = json.dumps(asdict(ended)).encode()
                while data:
                    data = data[write(to_parent, data) :]

            try:
                signal.alarm(120)
                run(job, tell)
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(2)
            os._exit(0)
        os.close(to_parent)
        with open(from_child, "rb") as pipe:  # noqa: PTH123
            answer = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps({"status": status, "ended": json.loads(answer or b"null")}), flush=True)


# --- in the test ---


class Crasher:
    """Runs each job in its own process."""

    def __init__(self) -> None:
        self._process = self._started()

    def _started(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
            text=True,
        )

    def run(self, job: Job) -> Ended:
        """Run a job, and return its outcome."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(asdict(job)) + "\n")
            self._process.stdin.flush()
            answer = json.loads(self._process.stdout.readline())
        except BaseException:
            # A test that runs out of time leaves its answer to the next test.
            self._process.kill()
            self.close()
            self._process = self._started()
            raise
        assert answer["ended"] is not None, f"{job} ended with {answer['status']}"
        ended = Ended(**answer["ended"])
        assert answer["status"] == (KILLED if ended.killed else 0)
        return replace(ended, calls=[(name, path) for name, path in ended.calls])

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


if __name__ == "__main__":
    main()
