"""Services that the tests start; one that does not start fails the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import botocore.hooks
import botocore.session
import pytest
from openbao import OpenBao
from s3_store import S3Store
from spark_cluster import HOSTS, JAVA_MISSING, PASSPHRASE, TOKEN_FILE, VARIABLE, SparkCluster, has_java
from spark_driver import SparkDriver

pytest.register_assert_rewrite("parquet_keytools.kms.contract_tests")

# Each client would read the descriptions of the services again, look at all functions that handle events, and find
# the present names of all events: that takes longer than most tests.
botocore.session.create_loader = cache(botocore.session.create_loader)  # type: ignore[assignment]
_accepts = WeakKeyDictionary[Any, bool]()
_event_names: dict[str, str] = {}
_accepts_kwargs, _init = botocore.hooks.accepts_kwargs, botocore.hooks.EventAliaser.__init__


def _accepts_kwargs_once(function: Any) -> bool:
    function = getattr(function, "__func__", function)
    if function not in _accepts:
        _accepts[function] = bool(_accepts_kwargs(function))
    return _accepts[function]


def _init_with_known_names(self: Any, *arguments: Any, **named: Any) -> None:
    _init(self, *arguments, **named)
    self._alias_name_cache = _event_names


botocore.hooks.accepts_kwargs = _accepts_kwargs_once
botocore.hooks.EventAliaser.__init__ = _init_with_known_names  # type: ignore[method-assign]


@pytest.fixture(scope="session")
def openbao(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenBao]:
    """An OpenBao server for all tests that leave it running."""
    server = OpenBao(tmp_path_factory.mktemp("openbao"), in_memory=True)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def java() -> None:
    """Java for Spark: without it the tests fail, and are not left out."""
    if os.environ.get("SPARK") != "no" and not has_java():
        pytest.fail(JAVA_MISSING)


@pytest.fixture(scope="session")
def spark_driver(tmp_path_factory: pytest.TempPathFactory, java: None) -> Iterator[SparkDriver]:
    """The driver of all tests with Spark, with what they need in its environment."""
    folder = tmp_path_factory.mktemp("spark-driver")
    environment = {
        VARIABLE: PASSPHRASE,
        TOKEN_FILE: str(folder / "token"),
        "PYSPARK_PYTHON": sys.executable,
        # For the tests with stores of their own; whoever is asked accepts them.
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    driver = SparkDriver(Path(__file__).with_name("spark_jobs.py"), folder, environment)
    try:
        yield driver
    finally:
        driver.close()


@pytest.fixture(scope="session")
def spark_cluster(tmp_path_factory: pytest.TempPathFactory, java: None) -> Iterator[SparkCluster]:
    """A cluster for all tests that need one; its hosts have tokens of OpenBao while a test has put them there."""
    folder = tmp_path_factory.mktemp("cluster")
    tokens = {host: {TOKEN_FILE: str(folder / f"token-{host}")} for host in HOSTS}
    cluster = SparkCluster(folder, {VARIABLE: PASSPHRASE, "PYSPARK_PYTHON": sys.executable}, tokens)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def running() -> Iterator[S3Store]:
    store = S3Store()
    yield store
    store.close()


@pytest.fixture
def store(running: S3Store) -> Iterator[S3Store]:
    """An S3 store that is empty."""
    yield running
    running.clear()
