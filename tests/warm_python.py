"""Runs Python programs in forks of a process that has imported what they need, which takes most of their time.

This is also the process: `python warm_python.py SOCKET`. Its clients are small programs that pass on their
arguments, folder, environment, input, output and signals, and end with the status that it returns.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from pathlib import Path
from typing import Any

LIBRARIES = (
    "opentelemetry.metrics",
    "opentelemetry.trace",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "rich.progress",
    "rich.table",
)
"""What commands import while they run."""

CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({socket!r})
    request = json.dumps([{kind!r}, sys.argv, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
    server.sendall(request)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: server.send(bytes([number])))
    status = server.recv(1)
sys.exit(status[0] if status else 99)
"""


class WarmPython:
    """The process, and its clients.

    Attributes:
        command: Runs `parquet-keytools`, in a folder without other programs.
        python: Runs `python -c` or a file, and treats a deprecated call of the program itself as an error.
    """

    def __init__(self) -> None:
        # A path of a socket must be short.
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        folder = Path(self._folder.name)
        self._process = subprocess.Popen(
            [sys.executable, __file__, folder / "socket"], stdout=subprocess.PIPE, text=True
        )
        self.command, self.python = folder / "bin" / "parquet-keytools", folder / "python"
        (folder / "bin").mkdir()
        for kind, program in (("command", self.command), ("code", self.python)):
            program.write_text(CLIENT.format(python=sys.executable, socket=str(folder / "socket"), kind=kind))
            program.chmod(0o755)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def close(self) -> None:
        """End it."""
        assert self._process.stdout is not None
        self._process.terminate()
        self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()


# --- in the process ---


def import_all() -> None:
    """Import the modules that programs import, without starting a thread."""
    import parquet_keytools.cli
    from parquet_keytools.kms.keystore_file import Keystore

    for name in LIBRARIES:
        importlib.import_module(name)
    for module in pkgutil.walk_packages(parquet_keytools.__path__, "parquet_keytools."):
        if not module.name.endswith(("contract_tests", "__main__")):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    # These programs do not test the cost of scrypt.
    Keystore.create.__func__.__kwdefaults__["scrypt_n"] = 2**14


def receive(connection: socket.socket) -> tuple[str, list[str]]:
    """Take over a client's input and output, folder and environment."""
    head, descriptors, _, _ = socket.recv_fds(connection, 4, 3)
    request = b""
    while len(request) < int.from_bytes(head, "big"):
        request += connection.recv(65536)
    kind, arguments, folder, environment = json.loads(request)
    for descriptor, ours in zip(descriptors, (0, 1, 2), strict=True):
        os.dup2(descriptor, ours)
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    return kind, arguments


def run(kind: str, arguments: list[str]) -> None:
    """Run the program."""
    if kind == "command":
        from parquet_keytools.cli import main

        sys.argv = arguments
        main()
        return
    sys.modules["__main__"] = program = types.ModuleType("__main__")
    if arguments[1] == "-c":
        code, sys.argv, folder, file = arguments[2], arguments[1:2] + arguments[3:], "", "<string>"
    else:
        (file,) = sys.argv = arguments[1:]
        program.__file__, folder, code = file, str(Path(file).parent), Path(file).read_text(encoding="utf-8")
        warnings.filterwarnings("error", category=DeprecationWarning, module="__main__")
    sys.path.insert(0, folder)
    exec(compile(code, file, "exec"), vars(program))


def run_to_the_end(kind: str, arguments: list[str]) -> None:
    """Run the program, and what it registered for its end.

    Python's own end would touch, and so copy, all memory that the processes share.
    """
    status: Any = 0

    def end() -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(status)

    # What is registered first is called last.
    atexit.register(end)
    try:
        run(kind, arguments)
    except SystemExit as done:
        status = done.code or 0
        raise
    except BaseException:
        status = 1
        raise


def wait(child: int, connection: socket.socket) -> None:
    """Pass on signals until the program ends, and then its status."""

    def pass_on() -> None:
        with contextlib.suppress(ProcessLookupError):
            while number := connection.recv(1):
                os.kill(child, number[0])
            # The client was killed.
            os.kill(child, signal.SIGKILL)

    threading.Thread(target=pass_on, daemon=True).start()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(bytes([status if status >= 0 else 128 - status]))


def serve(path: str) -> None:
    """Fork for each client; the forked process forks once more, and waits."""
    import_all()
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            kind, arguments = receive(connection)
            child = os.fork()
            if child == 0:
                connection.close()
                run_to_the_end(kind, arguments)
                return
            wait(child, connection)
            os._exit(0)
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


if __name__ == "__main__":
    serve(sys.argv[1])
