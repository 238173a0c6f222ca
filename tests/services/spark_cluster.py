"""A standalone cluster of Spark for tests: one master and two workers, as hosts 127.0.0.2 and 127.0.0.3."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from free_ports import free_port
from spark_jvm import TRUSTING_OPTIONS, kms_workers_below

JAVA_MISSING = (
    "the tests with Spark need Java 17: install it with `apt-get install openjdk-17-jre-headless`, or leave these "
    "tests out with `make test SPARK=no`"
)
HOSTS = ("127.0.0.2", "127.0.0.3")
PASSPHRASE = f"canary-{secrets.token_hex(16)}"
VARIABLE = "PASSPHRASE_OF_THE_SPARK_TESTS"
"""The environment variable with the passphrase of keystores, which executors have."""
TOKEN_FILE = "TOKEN_FILE_OF_THE_SPARK_TESTS"
"""The environment variable that names the file with a token of OpenBao, of each host another one."""
_START_SECONDS = 60


def has_java() -> bool:
    home = os.environ.get("JAVA_HOME")
    return shutil.which("java", path=str(Path(home) / "bin") if home else None) is not None


class SparkCluster:
    """The processes of a cluster; its executors' files lie under `folder/work`.

    Args:
        folder: For logs and work.
        environment: What executors have beyond this process's environment, as an administrator sets it.
        host_environments: What those of one host have beyond that.
    """

    def __init__(
        self,
        folder: Path,
        environment: dict[str, str],
        host_environments: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"spark://127.0.0.1:{self.port}"
        self._environment = os.environ | environment | {"SPARK_NO_DAEMONIZE": "1"}
        self._host_environments = host_environments or {}
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start all and wait until both workers are there; raises where they do not come."""
        self._run("master", "--host", "127.0.0.1", "--port", str(self.port), "--webui-port", "0")
        self._wait_for("master", "I have been elected leader")
        for host in HOSTS:
            arguments = ["--host", host, "--cores", "1", "--memory", "700m", "--webui-port", "0"]
            work = self.folder / "work" / host
            work.mkdir(parents=True)
            of_host = self._host_environments.get(host, {})
            self._run(f"worker-{host}", *arguments, "-d", str(work), self.url, environment=of_host)
        for host in HOSTS:
            self._wait_for(f"worker-{host}", "Successfully registered with master")

    def stop(self) -> None:
        """End all processes; workers end their executors."""
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def executor_logs(self, application: str = "app-*") -> dict[str, str]:
        """Return what each executor of an application wrote, by its folder."""
        return {
            str(path.parent.relative_to(self.folder / "work")): path.read_text(errors="replace")
            for path in sorted(self.folder.glob(f"work/*/{application}/*/stderr"))
        }

    def all_logs(self) -> dict[str, str]:
        """Return all that lies in its folder, by path."""
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        return {str(path): path.read_bytes().decode("latin-1") for path in files}

    def kms_workers(self) -> set[int]:
        """Return the KMS workers of this cluster's executors, by process id."""
        return kms_workers_below({process.pid for process in self._processes})

    def _run(self, name: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        import pyspark

        home = Path(pyspark.__file__).parent
        kind = "master.Master" if name == "master" else "worker.Worker"
        environment = {
            **self._environment,
            **(environment or {}),
            "SPARK_HOME": str(home),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": TRUSTING_OPTIONS,
            "PYSPARK_PYTHON": sys.executable,
        }
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [home / "bin" / "spark-class", f"org.apache.spark.deploy.{kind}", *arguments],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env=environment,
                )
            )

    def _wait_for(self, name: str, text: str) -> None:
        end = time.monotonic() + _START_SECONDS
        while not re.search(text, self.log(name)):
            if time.monotonic() > end or any(process.poll() is not None for process in self._processes):
                raise RuntimeError(f"Spark's {name} did not start:\n{self.log(name)[-2000:]}")
            time.sleep(0.1)
