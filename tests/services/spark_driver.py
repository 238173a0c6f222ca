"""A program of Spark in a process of its own, whose JVM takes one job after the other.

Starting a JVM, and warming it up, takes longer than most of what the tests do with it.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spark_jvm import TRUSTING_OPTIONS, remember_names

MOST_SECONDS = 400
JVM_SETTINGS = {
    "spark.driver.memory": "700m",
    "spark.driver.extraJavaOptions": TRUSTING_OPTIONS,
}
Configured = Callable[[Any], Any]
_RESULT = "RESULT "


LOCAL_SETTINGS = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # What changes plans while they run takes a sixth of the time of small jobs, and reads and writes no file.
    "spark.sql.adaptive.enabled": "false",
    # Each column that is named would ask the JVM for its place in the program.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
}
"""What all sessions have."""
WARM_DAEMON: dict[str, str] = {}
"""What those have that run tasks in a JVM of `start_jvm`."""


def start_jvm() -> None:
    """Start the JVM before a session does, whose settings would also be those of later ones."""
    from pyspark import SparkConf, SparkContext

    remember_names()
    # For the daemon of Python workers in this JVM.
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    WARM_DAEMON["spark.python.daemon.module"] = "warm_pyspark.daemon"
    SparkContext._ensure_initialized(conf=SparkConf(loadDefaults=False).setAll(list(JVM_SETTINGS.items())))


def new_session(
    master: str,
    settings: Mapping[str, str],
    configured: Configured = lambda builder: builder,
    log_level: str = "WARN",
) -> Any:
    """Make a session.

    Args:
        master: Where tasks run.
        settings: What it has besides `LOCAL_SETTINGS`.
        configured: Is given the builder last.
        log_level: Which the JVM has until another session is made.
    """
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).appName("parquet-keytools")
    daemon = WARM_DAEMON if master.startswith("local") else {}
    for name, value in {**LOCAL_SETTINGS, **daemon, **settings}.items():
        builder = builder.config(name, value)
    session = configured(builder).getOrCreate()
    session.sparkContext.setLogLevel(log_level)
    return session


class Sessions:
    """The session of the last job, which the next one uses if it would make the same."""

    def __init__(self) -> None:
        self._made_with: object = None
        self._session: Any = None

    def get(self, made_with: object, make: Callable[[], Any]) -> Any:
        """Return the session that was made with this, or make one."""
        if self._session is None or self._made_with != made_with:
            self.stop()
            self._session, self._made_with = make(), made_with
        return self._session

    def stop(self) -> None:
        """Stop the session that is there."""
        session, self._session = self._session, None
        if session is not None:
            session.stop()


def serve(do: Callable[[dict[str, Any]], Any]) -> None:
    """Do the jobs that come through stdin, one a line; this is the program's side."""
    for line in sys.stdin:
        try:
            answer = {"result": do(json.loads(line))}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(f"\n{_RESULT}{json.dumps(answer, default=str)}", flush=True)


class SparkDriver:
    """The tests' side. The process starts with the first job, and again where it has ended.

    Args:
        program: A file that calls `serve`.
        folder: Where it works, and has its log.
        environment: What it has beyond the environment of this process.
    """

    def __init__(self, program: Path, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self._program = program
        self.environment = dict(environment or {})
        self._log = folder / f"{program.stem}.log"
        self._log.touch()
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    @property
    def output(self) -> str:
        """All that it wrote so far, its JVM included."""
        return self._log.read_text(errors="replace")

    def do(self, **arguments: Any) -> Any:
        """Do a job."""
        self.begin(**arguments)
        return self.result()

    def begin(self, **arguments: Any) -> None:
        """Begin with a job; `result` waits for its end."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self._start()
        assert process.stdin is not None
        process.stdin.write(json.dumps(arguments, default=str) + "\n")
        process.stdin.flush()

    def result(self) -> Any:
        """Return what came of the job."""
        end = time.monotonic() + MOST_SECONDS
        while True:
            try:
                answer = json.loads(self._lines.get(timeout=1))
            except queue.Empty:
                assert self._process is not None
                assert self._process.poll() is None, self.output[-5000:]
                assert time.monotonic() < end, f"no answer in {MOST_SECONDS} seconds: {self.output[-5000:]}"
                continue
            assert "error" not in answer, answer["error"] + self.output[-5000:]
            return answer["result"]

    def close(self) -> None:
        """End the process; its JVM ends with it."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _start(self) -> subprocess.Popen[str]:
        with self._log.open("a") as log:
            self._process = process = subprocess.Popen(
                [sys.executable, self._program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=self.folder,
                env={**os.environ, **self.environment},
            )
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        return process

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout, self._log.open("a") as log:
            for line in process.stdout:
                # Results are output, too: nothing secret may stand in them.
                log.write(line)
                log.flush()
                if line.startswith(_RESULT):
                    self._lines.put(line.removeprefix(_RESULT))
