"""A Spark session as pipelines use it, without Spark: its tasks run here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from parquet_keytools.spark.kms_worker import KeyRequest


def key_request_bytes(request: KeyRequest) -> bytes:
    """Return the content of a request to wrap or unwrap, as `WorkerProcess.java` writes it."""
    name = request.master_key_id.encode()
    return len(name).to_bytes(2, "big") + name + request.key


class FakeSpark:
    """What a job needs of a session; its tasks run one after the other.

    Args:
        cores: The number of cores of the executors.
        attempts: How many attempts of each task run, at the same time; the results come from the last attempt.
        settings: Spark's settings.

    Attributes:
        partitions: The number of tasks of each job.
        descriptions: The description of each job in the web UI.
    """

    def __init__(self, cores: int = 2, attempts: int = 1, **settings: str) -> None:
        self.sparkContext = self
        self.defaultParallelism = cores
        self.partitions: list[int] = []
        self.descriptions: list[str] = []
        self._attempts = attempts
        self._settings = settings

    def getConf(self) -> dict[str, str]:  # noqa: N802 - Spark's name
        return {name.replace("_", "."): value for name, value in self._settings.items()}

    def getLocalProperty(self, _: str) -> None:  # noqa: N802
        return

    def setLocalProperty(self, _name: str, _value: str | None) -> None:  # noqa: N802
        return

    def setJobGroup(self, _: str, description: str) -> None:  # noqa: N802
        self.descriptions.append(description)

    def statusTracker(self) -> Any:  # noqa: N802
        return SimpleNamespace(getJobIdsForGroup=lambda _: [])

    def parallelize(self, data: list[Any], number: int) -> Any:
        self.partitions.append(number)

        def run(function: Callable[[int, Iterator[Any]], Iterator[Any]]) -> Any:
            def attempt(at: int) -> list[Any]:
                return list(function(at, iter(data[at::number])))

            results = []
            for at in range(number):
                with ThreadPoolExecutor(self._attempts) as pool:
                    *_, last = pool.map(attempt, [at] * self._attempts)
                results += last
            return SimpleNamespace(collect=lambda: results)

        return SimpleNamespace(mapPartitionsWithIndex=run)
