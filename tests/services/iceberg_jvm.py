"""A JVM that uses our KMS client as Iceberg's Java library does, and reads tables: `IcebergProgram.java`.

Iceberg's own classes are used if the variable ICEBERG_JARS names their jars, in the form of CLASSPATH.
"""

from __future__ import annotations

import atexit
import base64
import json
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pyspark
from spark_jvm import JAVA_OPTIONS

from parquet_keytools.spark import session

MOST_SECONDS = 200
PROGRAM = Path(__file__).with_name("IcebergProgram.java")
LIBRARY = Path(__file__).with_name("IcebergLibrary.java")
INTERFACE = Path(session.__file__).parent / "java" / "compile_only" / "KeyManagementClient.java"
SPARK_JARS = Path(pyspark.__file__).parent / "jars"
# Same as in Spark's own JVMs, whose class archive fits no other class path; jars of a test come after these.
SPARK_CLASS_PATH = [SPARK_JARS.with_name("conf"), *SPARK_JARS.glob("slf4j-api-*.jar"), SPARK_JARS / "*"]


def iceberg_jars() -> list[Path]:
    """Return the jars of Iceberg's Java library that ICEBERG_JARS names, or none."""
    return [Path(jar) for jar in os.environ.get("ICEBERG_JARS", "").split(os.pathsep) if jar]


class JavaError(Exception):
    """The program's error instead of a result, with its stack trace."""


class IcebergJvm:
    """The program, with our jar and Spark's."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log
        self.traces = ""

    @property
    def output(self) -> str:
        """Its log, and the stack traces of all errors; answers to `wrap` and `unwrap` are keys."""
        return self._log.read_text(errors="replace") + self.traces

    def do(self, what: str, **arguments: Any) -> Any:
        """Run a job."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("RESULT "):
                answer = json.loads(line.removeprefix("RESULT "))
                if "error" in answer:
                    self.traces += answer["trace"]
                    raise JavaError(answer["error"])
                return answer["result"]
        raise AssertionError(self.output[-5000:])

    def initialize(self, config: Path | None, **properties: str) -> str:
        """Create the client of a catalog; returns it as text."""
        given = {"encryption.kms-impl": "parquet_keytools.IcebergKeyManagementClient", **properties}
        if config is not None:
            given["keytools.config"] = str(config)
        return str(self.do("initialize", properties=given))

    def wrap(self, key: bytes, by: str | None) -> bytes:
        """Wrap a KEK."""
        return base64.b64decode(self.do("wrap", key=base64.b64encode(key).decode(), by=by))

    def unwrap(self, wrapped: bytes, by: str | None) -> bytes:
        """Unwrap a KEK."""
        return base64.b64decode(self.do("unwrap", key=base64.b64encode(wrapped).decode(), by=by))


@contextmanager
def iceberg_jvm(folder: Path, **environment: str) -> Iterator[IcebergJvm]:
    """Start the program; its log is written to a folder."""
    class_path = os.pathsep.join(
        map(str, [*iceberg_jars(), *SPARK_CLASS_PATH, compiled_program(), session.cached_jar()])
    )
    options = shlex.split(JAVA_OPTIONS)
    log = folder / "jvm.log"
    with (
        log.open("w") as stream,
        subprocess.Popen(
            [java(), *options, "-cp", class_path, PROGRAM.stem],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            cwd=folder,
            env=os.environ | environment,
        ) as process,
    ):
        try:
            yield IcebergJvm(process, log)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


@cache
def compiled_program() -> Path:
    """Return a folder with the program's classes, for as long as this process runs."""
    classes = tempfile.TemporaryDirectory(prefix="classes-")
    atexit.register(classes.cleanup)
    library = iceberg_jars()
    path = [*library, *sorted(SPARK_JARS.glob("*.jar"))]
    compile_java([PROGRAM, LIBRARY if library else INTERFACE], Path(classes.name), path)
    return Path(classes.name)


def compile_java(sources: list[Path], target: Path, path: list[Path]) -> None:
    """Compile with Janino, which ships with Spark, so that no JDK is needed."""
    compiler = [jar for jar in path if jar.name.startswith(("janino-", "commons-compiler-"))]
    done = subprocess.run(
        [
            java(),
            "-XX:TieredStopAtLevel=1",
            "-XX:+UseSerialGC",
            "-cp",
            os.pathsep.join(map(str, compiler)),
            "org.codehaus.commons.compiler.samples.CompilerDemo",
            "-d",
            target,
            "-encoding",
            "UTF-8",
            "-g:lines,source",
            "-classpath",
            os.pathsep.join(map(str, path)),
            *sources,
        ],
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
    )
    # The exit status is always 0.
    assert all(list(target.rglob(f"{source.stem}.class")) for source in sources), done.stdout + done.stderr


def java() -> str:
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=f"{home}/bin" if home else None)
    assert found is not None
    return found
