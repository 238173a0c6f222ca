"""What killed processes left behind in S3, and what the next run for the same target does about it."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from botocore.awsrequest import AWSPreparedRequest
from s3_store import BUCKET, S3Store, on_request, refusal

from parquet_keytools.storage import s3_connection
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.outputs import write_whole
from parquet_keytools.storage.temporary_files import DEAD_AFTER_SECONDS, parse_temporary_name, temporary_name


@pytest.fixture(scope="module")
def running() -> Iterator[S3Store]:
    store = S3Store()
    yield store
    store.close()


@pytest.fixture
def store(running: S3Store) -> Iterator[S3Store]:
    running.clear()
    yield running
    running.clear()


def dead_name(target: str) -> str:
    program = f"from parquet_keytools.storage.temporary_files import temporary_name as n; print(n({target!r}))"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip()


def of_another_machine(name: str) -> str:
    parts = name.split("-")
    return "-".join([parts[0], "00000000", *parts[2:]])


@pytest.fixture
def begun(store: S3Store) -> dict[str, str]:
    """Temporary objects and uploads: of a process that is gone, of one that lives, of one that nobody knows of."""
    names = {"dead": dead_name("x"), "alive": temporary_name("x"), "unknown": of_another_machine(dead_name("x"))}
    for name in names.values():
        store.put(f"d/{name}", b"half")
        store.client.create_multipart_upload(Bucket=BUCKET, Key=f"d/{name}.part"[: -len(".part")])
    store.put("d/.x.somebody.tmp", b"theirs")
    store.client.create_multipart_upload(Bucket=BUCKET, Key="d/x")
    return names


def uploads(store: S3Store) -> list[str]:
    found = store.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())
    return sorted(upload["Key"] for upload in found)


def test_the_next_run_removes_what_is_dead(
    store: S3Store, begun: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # This server says of each upload that it was begun in 2010.
    monkeypatch.setattr(s3_connection, "age_seconds", lambda upload: 3600.0)
    target = FileLocation(store.filesystem(), f"{BUCKET}/d/x")
    write_whole(target, b"whole")
    kept = [f"d/{begun['alive']}", f"d/{begun['unknown']}"]
    assert store.names() == sorted([*kept, "d/.x.somebody.tmp", "d/x"])
    assert uploads(store) == sorted([*kept, "d/x"])
    assert store.get("d/x") == b"whole"


def test_of_another_machine_only_age_tells(begun: dict[str, str]) -> None:
    parsed = {kind: parse_temporary_name(name) for kind, name in begun.items()}
    assert all(parsed.values())
    for age, expected in ((0.0, ["dead"]), (DEAD_AFTER_SECONDS + 1, ["dead", "unknown"])):
        assert [kind for kind, name in parsed.items() if name and name.is_dead(age)] == expected


def test_what_may_not_be_listed_or_ended_is_named(
    store: S3Store, begun: dict[str, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (refused, text) in enumerate(
        (("ListMultipartUploads", "s3:ListBucketMultipartUploads"), ("AbortMultipartUpload", "cannot be ended"))
    ):
        monkeypatch.setattr(s3_connection, "_said_of", set())
        filesystem = store.filesystem(background_writes=bool(number))

        def hook(operation: str, request: AWSPreparedRequest, refused: str = refused) -> Any:
            return refusal(request, 403, "AccessDenied") if operation == refused else None

        monkeypatch.setattr("parquet_keytools.storage.temporary_files.OccasionalScan.is_due", lambda *_: True)
        with caplog.at_level(logging.WARNING), on_request(filesystem, hook):
            write_whole(FileLocation(filesystem, f"{BUCKET}/d/x"), b"whole")
        assert text in caplog.text
        assert f"d/{begun['dead']}" in uploads(store)
    assert begun["dead"] in caplog.text


def test_who_may_not_delete_has_written_all_the_same(store: S3Store, caplog: pytest.LogCaptureFixture) -> None:
    inner = store.filesystem()

    class NoDelete:
        """Stands in for the file system of a role without s3:DeleteObject."""

        type_name = "s3"

        def __getattr__(self, name: str) -> object:
            return getattr(inner, name)

        def delete_file(self, path: str) -> None:
            raise PermissionError(13, "AWS Error ACCESS_DENIED during DeleteObject operation")

    location = FileLocation(NoDelete(), f"{BUCKET}/d/x")
    with caplog.at_level(logging.WARNING):
        write_whole(location, b"whole")
    assert store.get("d/x") == b"whole"
    (left,) = [name for name in store.names() if name != "d/x"]
    assert left in caplog.text and "cannot be removed: remove it" in caplog.text
