"""What killed processes left in S3, and how the next run for the same target handles it."""

from __future__ import annotations

import logging

import pytest
from s3_store import BUCKET, S3Store

from parquet_keytools.storage import outputs
from parquet_keytools.storage.local_files import temporary_name
from parquet_keytools.storage.locations import FileLocation
from parquet_keytools.storage.outputs import write_whole


@pytest.fixture
def begun(store: S3Store) -> str:
    """A temporary object and an upload of one, and objects of others; returns the name of ours."""
    name = temporary_name("x", is_locked=False)
    store.put(f"d/{name}", b"half")
    store.client.create_multipart_upload(Bucket=BUCKET, Key=f"d/{name}")
    store.put("d/.x.somebody.tmp", b"theirs")
    store.client.create_multipart_upload(Bucket=BUCKET, Key="d/x")
    return name


@pytest.fixture
def a_day_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "DEAD_AFTER_SECONDS", -1.0)


def uploads(store: S3Store) -> list[str]:
    found = store.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())
    return sorted(upload["Key"] for upload in found)


def test_what_is_older_than_a_day_is_removed(store: S3Store, begun: str, a_day_later: None) -> None:
    write_whole(FileLocation(store.filesystem(), f"{BUCKET}/d/x"), b"whole")
    assert store.names() == ["d/.x.somebody.tmp", "d/x"]
    assert store.get("d/x") == b"whole"


def test_a_running_write_is_not_disturbed(store: S3Store, begun: str) -> None:
    """Object stores have no locks, and this server dates all uploads to 2010."""
    write_whole(FileLocation(store.filesystem(), f"{BUCKET}/d/x"), b"whole")
    assert store.names() == sorted([f"d/{begun}", "d/.x.somebody.tmp", "d/x"])
    assert uploads(store) == sorted([f"d/{begun}", "d/x"])


def test_who_may_not_delete_has_written_all_the_same(store: S3Store, caplog: pytest.LogCaptureFixture) -> None:
    inner = store.filesystem()

    class NoDelete:
        """Imitates the file system of a role without s3:DeleteObject."""

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
