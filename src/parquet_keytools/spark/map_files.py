"""One function called for every file of a data set, by the tasks of a Spark job; `pipelines` stands on it.

Paths, sizes, wrapped keys and a configuration without its secrets travel to the tasks; each Python worker makes
its own KMS client. Limits of the KMS hold for the whole cluster: each task gets its share of them.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import re
import threading
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit

import pyarrow as pa

from parquet_keytools.config.loader import load_configuration
from parquet_keytools.config.settings import Configuration
from parquet_keytools.errors import (
    ConfigurationError,
    KeytoolsError,
    KmsUnavailableError,
    SparkJobFailedError,
    without_frames,
)
from parquet_keytools.files.key_service import KeyService, NewFileKeys, TablePolicy
from parquet_keytools.files.opened_file import FileIdentities
from parquet_keytools.keys.key_wrapping import decode_master_key_id
from parquet_keytools.kms.client import KmsClient, KmsSettings
from parquet_keytools.kms.named import each_kms, kmss_of
from parquet_keytools.kms.registry import make_client
from parquet_keytools.kms.remote_client import RemoteKmsSettings
from parquet_keytools.runtime.presentation import expanded
from parquet_keytools.spark.session import carried, carried_file, received_configuration, refuse_generated_keys
from parquet_keytools.storage.locations import FileLocation, PathLike

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")

FAILED = "failed"


# --- what goes to tasks, and what comes back ---


class NamedFile(NamedTuple):
    """A file of a data set, by its path within the root; the path is empty if the root is the file itself."""

    name: str
    size_bytes: int


@dataclass(frozen=True)
class Outcome:
    """What became of a file, which failed if it has an error; `other` is not in the rows of `report.files`."""

    path: str
    outcome: str
    detail: str | None = None
    keys: Sequence[dict[str, Any]] = ()
    bytes: int = 0
    seconds: float = 0.0
    error_class: str | None = None
    error: str | None = None
    other: Any = None

    @classmethod
    def of_error(cls, path: str, error: Exception, outcome: str = FAILED, size_bytes: int = 0) -> Outcome:
        """Return the outcome of a file that failed."""
        text = str(error) or type(error).__name__
        if isinstance(error, OSError) and error.strerror:
            text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        return cls(path, outcome, bytes=size_bytes, error_class=type(error).__name__, error=text)


FileFunction = Callable[["Worker", FileLocation, NamedFile], Outcome]
"""Called in a task for a file; must pickle and hold no secret. If it raises an error, the file fails."""


class CarriedKeys(NamedTuple):
    """What makes the keys of a job again in a worker: no secret. `tasks` share the limits of the KMS."""

    job_id: str
    configuration: str
    tasks: int


# --- the driver ---

_FILE_COST_BYTES = 2_000_000
"""What a file costs besides its bytes, in bytes: to open it, and to rename it."""

_TASKS_PER_CORE = 8
_MOST_FILES_PER_TASK = 500
_MOST_BYTES_PER_TASK = 4 << 30

_MOST_SECONDS_TO_END = 60.0
"""How long to wait, at most, until Spark has ended the attempts of tasks that came too late."""


class Job:
    """A command over the data set at `root`, as one Spark job or several; closes its KMS client with its block.

    Raises:
        ConfigurationError: Spark or its executors cannot use the configuration.
    """

    def __init__(
        self,
        spark: SparkSession,
        path: PathLike,
        configuration: Configuration | PathLike,
        *,
        file_on_nodes: str | None = None,
        max_tasks: int | None = None,
    ) -> None:
        try:
            self._context: Any = spark.sparkContext
            self._cores = int(self._context.defaultParallelism)
        except Exception:
            raise ConfigurationError(
                "the session has no SparkContext: pipelines need a classic session, not one of Spark Connect."
            ) from None
        if not isinstance(configuration, Configuration):
            configuration = load_configuration(configuration)
        self.session = spark
        self.started = time.monotonic()
        self._place = place_of(path)
        self.root = node_location(self._place)
        self.configuration = configuration
        self._file_on_nodes = file_on_nodes
        self._job_id = uuid.uuid4().hex
        # Wrong names of keys are found here, and not on every executor.
        self.keys = KeyService(configuration, None, time.monotonic)
        refuse_generated_keys(self.keys.kms)
        # A speculative copy of a task calls the KMS, too.
        speculates = self._context.getConf().get("spark.speculation", "false").lower() == "true"
        self._attempts_at_a_time = 2 if speculates else 1
        self._most_tasks = self._limit_of_tasks(max_tasks)
        self._kms_keys_of_tasks: Counter[str] = Counter()
        self._is_kms_seen = False
        self.tasks = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.keys.kms is not None:
            self.keys.kms.close()

    @property
    def kms_keys(self) -> Counter[str]:
        """The number of keys in requests to the KMS so far, by operation."""
        return self._kms_keys_of_tasks + _kms_counts(self.keys)

    def _limit_of_tasks(self, max_tasks: int | None) -> int | None:
        limits = [] if max_tasks is None else [max_tasks]
        for kms in _remote_kmss(self.configuration):
            if "max_concurrent_calls" in kms.model_fields_set:
                limits.append(max(1, kms.max_concurrent_calls // self._attempts_at_a_time))
            if kms.max_calls_per_second is not None and max_tasks is None:
                # More tasks would only make the share of each smaller.
                limits.append(self._cores)
        return min(limits, default=None)

    def map_files(
        self, what: str, function: FileFunction, files: Sequence[NamedFile]
    ) -> Iterator[tuple[NamedFile, Outcome]]:
        """Call a function for every file in tasks, and yield each file with its outcome when all tasks have ended.

        A file on which the function raises an error has failed; the others are processed all the same. Spark may
        run a task again, also at the same time: the function writes files as a whole, or not at all. Neighbours
        in `files` are likely to be in one task. `what` is for the web UI.

        Raises:
            ConfigurationError: An executor cannot use the configuration.
            KmsUnavailableError: The KMS does not answer.
            SparkJobFailedError: Tasks failed for a reason that is not about a file.
        """
        if not files:
            return
        self._refuse_unreachable_kms(files[0])
        pieces = _cut(files, self._number_of_tasks(files))
        at_a_time = len(pieces) if self._most_tasks is not None else min(len(pieces), self._cores)
        text = carried(self.configuration) if self._file_on_nodes is None else carried_file(self._file_on_nodes)
        keys = CarriedKeys(self._job_id, text, at_a_time * self._attempts_at_a_time)
        results = self._run(what, partial(_run_tasks, function, keys, self._place), pieces)
        self.tasks += len(pieces)
        for result in results:
            if isinstance(result, KeytoolsError):
                raise result
        for piece, result in zip(pieces, results, strict=True):
            # Unpacked one by one: the outcomes of a million files would take gigabytes.
            outcomes, kms_keys = pickle.loads(zlib.decompress(result))  # noqa: S301 - from our own tasks
            self._kms_keys_of_tasks += kms_keys
            yield from zip(piece, outcomes, strict=True)

    def _refuse_unreachable_kms(self, file: NamedFile) -> None:
        """Open a file on the driver, once. Without the KMS, each task would wait for the deadline of its calls."""
        if self._is_kms_seen:
            return
        self._is_kms_seen = True
        try:
            self.keys.open_files([file_at(self.root, file.name)], identities=FileIdentities(refuses=False))
        except KmsUnavailableError as error:
            if not error.others_may_answer:
                raise
        except (KeytoolsError, OSError, UnicodeEncodeError, pa.ArrowException):
            # A matter of this file, which its task reports.
            return

    def _number_of_tasks(self, files: Sequence[NamedFile]) -> int:
        if self._most_tasks is not None:
            return min(len(files), self._most_tasks)
        size_bytes = sum(file.size_bytes for file in files)
        wanted = (
            _TASKS_PER_CORE * self._cores,
            -(-len(files) // _MOST_FILES_PER_TASK),
            size_bytes // _MOST_BYTES_PER_TASK,
        )
        return min(len(files), max(wanted))

    def _run(self, what: str, task: Callable[..., Any], pieces: list[list[NamedFile]]) -> list[Any]:
        context, group = self._context, f"parquet-keytools-{uuid.uuid4().hex}"
        properties = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
        before = {name: context.getLocalProperty(name) for name in properties}
        context.setJobGroup(group, f"parquet-keytools: {what}")
        try:
            found: list[Any] = context.parallelize(pieces, len(pieces)).mapPartitionsWithIndex(task).collect()
        except Exception as error:
            raise SparkJobFailedError(
                f"Spark aborted the job: {_last_line(error)}",
                hint="Finished files are kept. See the logs of the executors, then repeat the call.",
            ) from None
        finally:
            for name, value in before.items():
                context.setLocalProperty(name, value)
            if self._attempts_at_a_time > 1:
                # If Spark is gone, so are its tasks.
                with contextlib.suppress(Exception):
                    _wait_for_attempts(context.statusTracker(), group)
        return found


def _cut(files: Sequence[NamedFile], number: int) -> list[list[NamedFile]]:
    """Cut files into pieces that take about the same time, in their order."""
    cost_per_piece = sum(file.size_bytes + _FILE_COST_BYTES for file in files) / number
    pieces: list[list[NamedFile]] = []
    cost = 0
    for file in files:
        if not pieces or (cost >= cost_per_piece * len(pieces) and len(pieces) < number):
            pieces.append([])
        pieces[-1].append(file)
        cost += file.size_bytes + _FILE_COST_BYTES
    return pieces


def _wait_for_attempts(tracker: Any, group: str) -> None:
    """Wait for late copies of tasks: until Spark ends them, they write, and could undo what is done next."""
    end = time.monotonic() + _MOST_SECONDS_TO_END
    jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]
    for stage_id in [stage for job in jobs if job is not None for stage in job.stageIds]:
        while time.monotonic() < end:
            stage = tracker.getStageInfo(stage_id)
            if stage is None or not stage.numActiveTasks:
                break
            time.sleep(0.1)


def _last_line(error: Exception) -> str:
    """Return the line of Spark's error that gives the reason."""
    cause: Any = getattr(error, "java_exception", None)
    text = str(error)
    if cause is not None:
        while cause.getCause() is not None:
            cause = cause.getCause()
        text = str(cause.getMessage() or cause.toString())
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("at ")]
    stages = [line for line in lines if "Job aborted" in line or "Error" in line]
    return (stages or lines or [type(error).__name__])[-1][:500]


# --- places ---

_HADOOP_S3 = re.compile(r"s3[an]:", re.IGNORECASE)
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def place_of(path: PathLike) -> str:
    """Return a path or URI for executors; refuse credentials in it: Spark may log what it sends."""
    text = os.fspath(path)
    if not _URI.match(text):
        return str(expanded(text).absolute())
    if ":" in urlsplit(text).netloc.rpartition("@")[0]:
        raise ConfigurationError(
            "there are credentials in the URI, which must not be sent to Spark's executors.",
            hint="Give every node its own: an instance profile, environment variables or files.",
        )
    return _HADOOP_S3.sub("s3:", text)


def node_location(place: str) -> FileLocation:
    """Resolve a place with this node's credentials; refuse a URI that pyarrow does not know."""
    try:
        return FileLocation.resolve(place)
    except (ValueError, NotImplementedError):
        scheme = place.partition(":")[0]
        raise ConfigurationError(f"pyarrow cannot open this URI of the scheme {scheme!r}.") from None


def file_at(root: FileLocation, name: str) -> FileLocation:
    """Return a file of a data set; without a name, the root itself."""
    return root.below(name) if name else root


# --- the tasks ---


def _run_tasks(
    function: FileFunction, keys: CarriedKeys, place: str, position: int, pieces: Iterator[list[NamedFile]]
) -> Iterator[bytes | KeytoolsError]:
    for piece in pieces:
        try:
            worker = _worker(keys, position)
            root = node_location(place)
        except ConfigurationError as error:
            # The same on every node, or a problem of the nodes: another attempt would not help.
            yield without_frames(error)
            return
        before = _kms_counts(worker.keys)
        outcomes: list[Outcome] = []
        for file in piece:
            location = file_at(root, file.name)
            if worker.unavailable is None:
                outcomes.append(_outcome(function, worker, location, file))
            else:
                reason = f"not started, because the KMS was unavailable before: {worker.unavailable}"
                kind = KmsUnavailableError.__name__
                outcomes.append(Outcome(str(location), FAILED, error_class=kind, error=reason))
        asked = _kms_counts(worker.keys) - before
        yield zlib.compress(pickle.dumps((outcomes, asked)), level=1)


def _outcome(function: FileFunction, worker: Worker, location: FileLocation, file: NamedFile) -> Outcome:
    started = time.monotonic()
    try:
        outcome = function(worker, location, file)
    except (KeytoolsError, OSError, UnicodeEncodeError, pa.ArrowException) as error:
        outcome = Outcome.of_error(str(location), error, size_bytes=file.size_bytes)
        if isinstance(error, KmsUnavailableError) and not error.others_may_answer:
            # Every other file of this job would wait for the KMS as long as this one did.
            worker.unavailable = outcome.error
    return replace(outcome, seconds=time.monotonic() - started)


class WorkerKeyService(KeyService):
    """A key service that lives as long as a job, and remembers which keys the last new file got."""

    def __init__(self, configuration: Configuration, kms: KmsClient | None) -> None:
        super().__init__(configuration, kms, time.monotonic)
        self._last = threading.local()

    def clear_caches(self) -> None:
        """Do nothing: caches are new with each job, and are for all of its files."""

    def new_file_keys(self, policy: TablePolicy, location: FileLocation) -> NewFileKeys:
        """Make the keys of a new file; see `KeyService.new_file_keys`."""
        new = super().new_file_keys(policy, location)
        self._last.keys = new
        return new

    def take_last_keys(self) -> list[dict[str, Any]]:
        """Return the master keys of this thread's last new file, with versions and numbers of keys."""
        new: NewFileKeys | None = getattr(self._last, "keys", None)
        self._last.keys = None
        if new is None or self.kms is None:
            return []
        counts: Counter[tuple[str, str | None]] = Counter()
        for _, key_metadata in new.encryption.deks:
            material = new.material(key_metadata)
            if material is not None:
                master_key_id = self.kms.id_of_file(
                    decode_master_key_id(material.master_key_id), new.kms_instance_id
                )
                version = self.kms.wrapped_key_version(material.kms_wrapped_key, master_key_id)
                counts[master_key_id, version] += 1
        return [
            {"master_key": master_key_id, "version": version, "number": number}
            for (master_key_id, version), number in counts.items()
        ]


class Worker:
    """The keys of a job in this process, and what its tasks keep for the next task here."""

    def __init__(self, carried: CarriedKeys, position: int) -> None:
        from pyspark import SparkFiles, TaskContext

        folder = Path(SparkFiles.getRootDirectory()) if TaskContext.get() is not None else Path.cwd()
        configuration = received_configuration(carried.configuration, folder)
        kms = None
        if configuration.kms is not None:
            shared = each_kms(configuration.kms, partial(_shared, tasks=carried.tasks))
            kms = make_client(shared, configuration.folder)
        self.keys = WorkerKeyService(configuration, kms)
        self.unavailable: str | None = None
        """Why the KMS could not be reached. Then this process begins no other file of the job."""
        self._kept: dict[str, Any] = {}
        # Tasks that start together do not all call the KMS at once.
        slowest = [kms.max_calls_per_second or math.inf for kms in _remote_kmss(configuration)]
        time.sleep(position % carried.tasks / min(slowest, default=math.inf))

    def keep(self, name: str, make: Callable[[], T]) -> T:
        """Return what was made under a name for this job, or make it."""
        if name not in self._kept:
            self._kept[name] = make()
        kept: T = self._kept[name]
        return kept


_workers: dict[CarriedKeys, Worker] = {}


def _worker(carried: CarriedKeys, position: int) -> Worker:
    """Return the keys of a job, or raise `ConfigurationError`; the keys of an earlier job are forgotten."""
    if carried not in _workers:
        while _workers:
            _, worker = _workers.popitem()
            if worker.keys.kms is not None:
                worker.keys.kms.close()
        _workers[carried] = Worker(carried, position)
    return _workers[carried]


_CALLS_TO_WAIT_FOR = 20
"""How many other calls of its task a call may wait for before it counts as failed."""

_MOST_SECONDS = 3600.0


def _remote_kmss(configuration: Configuration) -> list[RemoteKmsSettings]:
    return [kms for kms in kmss_of(configuration.kms) if isinstance(kms, RemoteKmsSettings)]


def _shared(settings: KmsSettings, tasks: int) -> KmsSettings:
    """Return the settings of a KMS client that shares the limits with the other tasks."""
    if not isinstance(settings, RemoteKmsSettings) or tasks <= 1:
        return settings
    shared = settings.shared_by(tasks)
    if shared.max_calls_per_second is None:
        return shared
    # A call that waits for its turn has not failed.
    patience = min(_MOST_SECONDS, _CALLS_TO_WAIT_FOR / shared.max_calls_per_second)
    return shared.model_copy(update={"timeout_seconds": max(settings.timeout_seconds, patience)})


def _kms_counts(service: KeyService) -> Counter[str]:
    return Counter() if service.kms is None else Counter(service.kms.call_counts)
