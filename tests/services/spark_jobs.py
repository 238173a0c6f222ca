"""The program of Spark that all tests with Spark share; a job names its kind, and the rest is of that kind."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pipeline_program
import spark_labels_program
import spark_overwrites
import spark_prefixes_program
import spark_program
import spark_tenants_program
import spark_ways
from spark_driver import Sessions, SparkDriver, new_session, serve, start_jvm

SESSIONS = Sessions()
CLIENTS = SparkDriver(Path(__file__).with_name("spark_connect_client.py"), Path.cwd())
KINDS = {
    "bridge": spark_program.main,
    "pipelines": pipeline_program.main,
    "read": pipeline_program.read,
    "labels": spark_labels_program.main,
    "tenants": spark_tenants_program.main,
    "prefixes": spark_prefixes_program.main,
    "overwrites": lambda sessions, arguments: spark_overwrites.main(sessions, CLIENTS, arguments),
    "ways": lambda sessions, arguments: spark_ways.main(sessions, CLIENTS, arguments),
    "stop": lambda sessions, arguments: sessions.stop(),
}


def main(arguments: dict[str, Any]) -> Any:
    """Do a job of one kind."""
    return KINDS[arguments.pop("kind")](SESSIONS, arguments)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # Spark's, that it does not know this pandas.
    start_jvm()
    # Our jar comes to a JVM that runs already, and had an earlier session.
    new_session("local[1]", {}).stop()
    try:
        serve(main)
    finally:
        SESSIONS.stop()
