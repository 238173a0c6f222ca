"""Several processes write one encrypted Iceberg table while others read it; in a soak, for a minute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from iceberg_case import Lake
from soak import SOAK

from parquet_keytools.iceberg.table_audit import TableAudit, located_table

WORKER = Path(__file__).with_name("iceberg_users_worker.py")


def test_writers_and_readers_lose_nothing(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.create()
    seconds, turns, writers, readers = (60, 0, 4, 4) if SOAK else (0, 1, 2, 1)
    environment = {**os.environ, "PYTHONPATH": str(WORKER.parents[1])}
    arguments = [str(value) for value in (tmp_path, seconds, turns, writers, readers)]
    done = subprocess.run(
        [sys.executable, str(WORKER), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = tmp_path / "seen"
    results = [json.loads(path.read_text()) for path in sorted(seen.glob("*.json"))]
    print(results)
    assert len(results) == writers + readers
    acknowledged = sorted(
        int(line) for path in seen.glob("acknowledged-*") for line in path.read_text().split("\n")[:-1]
    )
    assert len(acknowledged) == 3 * sum(result.get("turns", 0) for result in results) >= 3 * writers
    assert lake.ids() == lake.outside_ids_of(lake.load().metadata_location) == acknowledged
    # Each commit is one snapshot, and only commits that found no KEK made one.
    metadata = lake.metadata()
    assert len(metadata["snapshots"]) == sum(result.get("commits", 0) for result in results)
    assert sum("properties" in entry for entry in metadata["encryption-keys"]) == 1
    # Commits that lost the race left nothing.
    located = located_table(lake.load().metadata_location, tmp_path / "keytools.yaml")
    report = TableAudit(located, with_data=True).run()
    assert report.findings == [] and report.encryption.unneeded_keys == ()
    log = {entry["metadata-file"] for entry in metadata["metadata-log"]}
    assert report.orphans is not None
    assert [path for path in report.orphans if not (path.endswith(".json") and len(log) >= 100)] == []
    lake.assert_no_plaintext()
