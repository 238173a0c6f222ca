"""Reads files with Spark, in its own process and JVM: some attacks crash it.

    python spark_reader.py FIRST_NUMBER FILE ...

prints the same as `pyarrow_reader.py`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "interop"))

from attacks import CHANGED, MASTER_KEYS, REFUSED, RIGHT, table
from engines.policy import COLUMN_KEYS, EncryptedFile
from engines.sample import MASTER_KEYS as SPARK_MASTER_KEYS
from engines.spark import Spark, spark_session
from py4j.protocol import Py4JError

_LAST_WORDS = ("OutOfMemoryError", "SparkContext was shut down")
"""Spark reports this and then ends its JVM: the error may come before the end, or not at all."""


def main(first: int, paths: list[str]) -> None:
    assert SPARK_MASTER_KEYS == MASTER_KEYS
    right = table(first).to_pylist()
    with tempfile.TemporaryDirectory() as folder, spark_session(Path(folder)) as session:
        spark = Spark(session)
        for path in paths:
            try:
                found = spark.read(EncryptedFile("attacker", COLUMN_KEYS, Path(path)))
                outcome, error = (RIGHT if found.sort_by("x").to_pylist() == right else CHANGED), ""
            except (ConnectionError, Py4JError):
                raise  # The JVM has ended.
            except Exception as exception:
                outcome, error = REFUSED, str(exception)
                if any(text in error for text in _LAST_WORDS):
                    # Otherwise, on a busy machine, the next file would find the JVM gone.
                    session.sparkContext._gateway.proc.wait(60)
                    raise
            print(json.dumps({"file": path, "outcome": outcome, "error": error}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
