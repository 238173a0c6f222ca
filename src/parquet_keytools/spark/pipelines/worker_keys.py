"""The keys of a configuration in a Python worker of an executor, made once for all tasks of a job.

Limits of the KMS hold for the whole cluster, and each task gets its share of them. With N tasks at a time that is
1/N of `max_calls_per_second`, and 1/N of `max_concurrent_calls`, but at least one call. Where the configuration
itself sets `max_concurrent_calls`, a job has no more tasks than that.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parquet_keytools.config.settings import Configuration
from parquet_keytools.files.key_service import KeyService, NewFileKeys, TablePolicy
from parquet_keytools.keys.key_wrapping import decode_master_key_id
from parquet_keytools.kms.client import KmsClient, KmsSettings
from parquet_keytools.kms.registry import make_client
from parquet_keytools.kms.remote_client import RemoteKmsSettings
from parquet_keytools.spark.transport import received_configuration
from parquet_keytools.storage.locations import FileLocation

_MOST_CLIENTS = 4
"""So many KMS clients stay open in a Python worker, which Spark ends when it is idle for a minute."""


@dataclass(frozen=True)
class CarriedKeys:
    """What makes the keys of a configuration again in a worker. Holds no secret.

    Attributes:
        job_id: Of the job: another one gets caches of its own.
        configuration: As `carried` returned it.
        tasks: Among how many tasks the limits of the KMS are divided.
        new_configuration: Another configuration that new keys come from; None for the same.
    """

    job_id: str
    configuration: str
    tasks: int
    new_configuration: str | None = None


class JobKeyService(KeyService):
    """A key service that lives as long as a job, and remembers which keys the last new file of a thread got."""

    def __init__(self, configuration: Configuration, kms: KmsClient | None) -> None:
        super().__init__(configuration, kms, time.monotonic)
        self._last = threading.local()

    def clear_caches(self) -> None:
        """Nothing: caches are new with each job, and shall last for all of its files."""

    def new_file_keys(
        self, policy: TablePolicy, location: FileLocation, reference_suffix: str = ""
    ) -> NewFileKeys:
        """Make the keys of a new file; see `KeyService.new_file_keys`."""
        new = super().new_file_keys(policy, location, reference_suffix)
        self._last.keys = new
        return new

    def take_last_keys(self) -> list[dict[str, Any]]:
        """Return the master keys of this thread's last new file, each with its version and its number of keys."""
        new: NewFileKeys | None = getattr(self._last, "keys", None)
        self._last.keys = None
        if new is None:
            return []
        counts: Counter[tuple[str, str | None]] = Counter()
        for _, key_metadata in new.encryption.deks:
            material = new.material(key_metadata)
            if material is not None and self.kms is not None:
                master_key_id = decode_master_key_id(material.master_key_id)
                version = self.kms.wrapped_key_version(material.kms_wrapped_key, master_key_id)
                counts[master_key_id, version] += 1
        return [
            {"master_key": master_key_id, "version": version, "number": number}
            for (master_key_id, version), number in counts.items()
        ]


class WorkerKeys:
    """The keys of a job in this process, and what its tasks keep for the next one here."""

    def __init__(self, carried: CarriedKeys, position: int) -> None:
        self.keys = _service(carried.configuration, carried.tasks)
        self.new_keys = self.keys
        if carried.new_configuration is not None:
            self.new_keys = _service(carried.new_configuration, carried.tasks)
        self.remembered: dict[str, Any] = {}
        time.sleep(first_pause_seconds(self.new_keys.configuration.kms, carried.tasks, position))

    def kms_counts(self) -> Counter[str]:
        """Return for how many keys the KMS was asked in this process, by operation."""
        counts: Counter[str] = Counter()
        for service in {id(self.keys): self.keys, id(self.new_keys): self.new_keys}.values():
            if service.kms is not None:
                counts += service.kms.call_counts
        return counts


class _Held:
    lock = threading.Lock()
    job: tuple[str, int] | None = None
    keys: WorkerKeys | None = None
    spared_modules = 0
    clients: OrderedDict[tuple[str, int], tuple[KmsSettings, KmsClient]] = OrderedDict()  # noqa: RUF012


def worker_keys(carried: CarriedKeys, position: int = 0) -> WorkerKeys:
    """Return the keys of a job, or raise `ConfigurationError`; those of an earlier job are forgotten."""
    with _Held.lock:
        # The next tasks of the same job may be more, and each have a smaller share of the limits.
        if _Held.job != (carried.job_id, carried.tasks) or _Held.keys is None:
            _Held.keys = None
            _Held.keys = WorkerKeys(carried, position)
            _Held.job = carried.job_id, carried.tasks
        return _Held.keys


def spare_modules() -> None:
    """Spare the collector of garbage what imports left behind, after a task that imported something.

    Spark calls it after each task, and it walked through all modules and their classes, which took longer than
    most small files.
    """
    if _Held.spared_modules != len(sys.modules):
        gc.collect()
        gc.freeze()
        _Held.spared_modules = len(sys.modules)


def _service(text: str, tasks: int) -> JobKeyService:
    from pyspark import SparkFiles, TaskContext

    folder = Path(SparkFiles.getRootDirectory()) if TaskContext.get() is not None else Path.cwd()
    configuration = received_configuration(text, folder)
    return JobKeyService(configuration, _client(configuration, text, tasks))


def _client(configuration: Configuration, text: str, tasks: int) -> KmsClient | None:
    """Return a KMS client; it outlives a job: to open a keystore, or to log in, takes longer than many files."""
    if configuration.kms is None:
        return None
    key = (text, tasks)
    settings, client = _Held.clients.pop(key, (None, None))
    # A file that is loaded here may say something else now, or hold another secret.
    if client is not None and settings != configuration.kms:
        client.close()
        client = None
    if client is None:
        client = make_client(shared_settings(configuration.kms, tasks), configuration.folder)
    _Held.clients[key] = configuration.kms, client
    while len(_Held.clients) > _MOST_CLIENTS:
        _, (_, oldest) = _Held.clients.popitem(last=False)
        oldest.close()
    return client


# --- each task's share of the limits ---


_CALLS_TO_WAIT_FOR = 20
"""A call may wait for so many others of its task before it counts as failed."""

_MOST_SECONDS = 3600.0

_SETTLING_SECONDS = 15.0
"""Until so long after the start of a session, its executors are waited for."""

_SETTLED_SECONDS = 1.0
"""When no other one came for so long, those that are there are all."""


def task_slots(spark: Any) -> int | None:
    """Return how many tasks run at a time at most, as far as that can be told; None where nothing limits it.

    These are the task slots of the executors that are there, or that the settings allow, if that is more.
    """
    settings = spark.sparkContext.getConf()
    master = str(settings.get("spark.master", ""))
    if master == "local" or master.startswith("local["):
        return max(1, _slots_now(spark))
    now = _settled_slots(spark)
    given_cores = settings.get("spark.executor.cores")
    slots = max(1, int(given_cores or "1") // int(settings.get("spark.task.cpus", "1")))
    if settings.get("spark.dynamicAllocation.enabled", "false") == "true":
        most = settings.get("spark.dynamicAllocation.maxExecutors")
        # An executor of a standalone cluster takes all cores of its host.
        is_open = most is None or (given_cores is None and master.startswith("spark:"))
        return None if is_open else max(now, int(most) * slots)
    instances = int(settings.get("spark.executor.instances", "0"))
    return max(now, instances * slots, int(settings.get("spark.cores.max", "0")))


def _slots_now(spark: Any) -> int:
    context = spark.sparkContext._jsc.sc()
    return int(context.maxNumConcurrentTasks(context.resourceProfileManager().defaultResourceProfile()))


def _settled_slots(spark: Any) -> int:
    """Return how many task slots there are; the executors of a new session come one after the other."""
    end = spark.sparkContext.startTime / 1000 + _SETTLING_SECONDS
    now, since = _slots_now(spark), time.time()
    while time.time() < end and (not now or time.time() < since + _SETTLED_SECONDS):
        time.sleep(0.1)
        found = _slots_now(spark)
        if found != now:
            now, since = found, time.time()
    return max(1, now)


def most_tasks_of(*configurations: Configuration | None) -> int | None:
    """Return how many tasks a job may have because of explicit limits of calls at a time; None for any number."""
    limits = [
        settings.max_concurrent_calls
        for configuration in configurations
        if configuration is not None
        and isinstance(settings := configuration.kms, RemoteKmsSettings)
        and "max_concurrent_calls" in settings.model_fields_set
    ]
    return min(limits, default=None)


def shared_settings(settings: KmsSettings, tasks: int) -> KmsSettings:
    """Return the settings of a KMS client that is one of so many."""
    if not isinstance(settings, RemoteKmsSettings) or tasks <= 1:
        return settings
    shared = settings.shared_by(tasks)
    if shared.max_calls_per_second is None:
        return shared
    # A call that waits for its turn has not failed.
    patience = max(settings.timeout_seconds, _CALLS_TO_WAIT_FOR / shared.max_calls_per_second)
    seconds = max(settings.timeout_seconds, min(_MOST_SECONDS, patience))
    return shared.model_copy(update={"timeout_seconds": seconds})


def first_pause_seconds(settings: KmsSettings | None, tasks: int, position: int) -> float:
    """Return how long a task waits before its first call: tasks that start together do not all ask at once."""
    if not isinstance(settings, RemoteKmsSettings) or settings.max_calls_per_second is None or tasks <= 1:
        return 0.0
    return (position % tasks) / settings.max_calls_per_second
