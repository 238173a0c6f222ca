"""A session of Spark as pipelines use it, without Spark: its tasks run here, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from parquet_keytools.spark.pipelines.file_tables import TaskResult
from parquet_keytools.spark.transport import KeyRequest


def key_request_bytes(request: KeyRequest) -> bytes:
    """Return the content of a request to wrap or unwrap, as `WorkerProcess.java` writes it."""
    name = request.master_key_id.encode()
    return len(name).to_bytes(2, "big") + name + request.key


class FakeSpark:
    """What a job asks of a session; its tasks run one after the other.

    Args:
        slots: How many task slots there are, look by look; the last number stays.
        settings: Of Spark.
    """

    defaultParallelism = 2  # noqa: N815 - Spark's name

    def __init__(self, slots: list[int], **settings: str) -> None:
        self.sparkContext = self
        self.startTime = 0
        self.partitions: list[int] = []
        self._slots = slots
        self._settings = settings
        self._jsc = SimpleNamespace(sc=lambda: self)

    def getConf(self) -> dict[str, str]:  # noqa: N802 - Spark's name
        return {name.replace("_", "."): value for name, value in self._settings.items()}

    def resourceProfileManager(self) -> Any:  # noqa: N802
        return SimpleNamespace(defaultResourceProfile=lambda: None)

    def maxNumConcurrentTasks(self, _: object) -> int:  # noqa: N802
        return self._slots.pop(0) if len(self._slots) > 1 else self._slots[0]

    def setJobDescription(self, _: str) -> None:  # noqa: N802
        return

    def addJobTag(self, _: str) -> None:  # noqa: N802
        return

    def removeJobTag(self, _: str) -> None:  # noqa: N802
        return

    def broadcast(self, value: object) -> Any:
        return SimpleNamespace(value=value, destroy=lambda: None)

    def statusTracker(self) -> Any:  # noqa: N802
        return SimpleNamespace(getJobIdsForTag=lambda _: [])

    def parallelize(self, data: list[bytes], number: int) -> Any:
        self.partitions.append(number)

        def run(function: Callable[[int, Iterator[bytes]], Iterator[TaskResult]]) -> Any:
            parts = [data[at::number] for at in range(number)]
            results = [result for at, part in enumerate(parts) for result in function(at, iter(part))]
            return SimpleNamespace(collect=lambda: results)

        return SimpleNamespace(mapPartitionsWithIndex=run)
