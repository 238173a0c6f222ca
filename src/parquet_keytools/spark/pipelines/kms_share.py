"""Limits of the KMS held by a whole cluster: each task gets its share of them.

The rule: with N tasks at a time, each gets 1/N of `max_calls_per_second`, and 1/N of `max_concurrent_calls`, but
at least one call. Where the configuration itself sets `max_concurrent_calls`, a job has no more tasks than that.
"""

from __future__ import annotations

import time
from typing import Any

from parquet_keytools.config.settings import Configuration
from parquet_keytools.kms.client import KmsSettings
from parquet_keytools.kms.remote_client import RemoteKmsSettings

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
    update: dict[str, Any] = {"max_concurrent_calls": max(1, settings.max_concurrent_calls // tasks)}
    if settings.max_calls_per_second is not None:
        rate = settings.max_calls_per_second / tasks
        update["max_calls_per_second"] = rate
        # A call that waits for its turn has not failed.
        patience = max(settings.timeout_seconds, _CALLS_TO_WAIT_FOR / rate)
        update["timeout_seconds"] = max(settings.timeout_seconds, min(_MOST_SECONDS, patience))
    return settings.model_copy(update=update)


def first_pause_seconds(settings: KmsSettings | None, tasks: int, position: int) -> float:
    """Return how long a task waits before its first call: tasks that start together do not all ask at once."""
    if not isinstance(settings, RemoteKmsSettings) or settings.max_calls_per_second is None or tasks <= 1:
        return 0.0
    return (position % tasks) / settings.max_calls_per_second
