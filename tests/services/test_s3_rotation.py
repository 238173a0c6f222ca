"""Rotation of files in S3, on moto's server over HTTP, through a proxy that counts bytes."""

from __future__ import annotations

import importlib.util
import io
import itertools
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import botocore.exceptions
import botocore.retries.standard
import numpy as np
import pyarrow as pa
import pytest
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from pyarrow import fs as pafs
from rotation_case import TABLE, Case, key_material_file
from s3_store import BUCKET, S3Store, etag_in, key_in, on_request, refusal
from soak import SOAK

from parquet_keytools import Keytools
from parquet_keytools.errors import ChangedMeanwhileError
from parquet_keytools.rotation import rotate as tail
from parquet_keytools.rotation import s3_replacement
from parquet_keytools.rotation.file_keys import Tail, file_state
from parquet_keytools.rotation.report import FileRotation, Outcome
from parquet_keytools.rotation.rotate import copies_in_store
from parquet_keytools.rotation.s3_replacement import LEAST_PART_BYTES, S3Object, client_of, read_object
from parquet_keytools.storage.locations import FileLocation

every_key_material = pytest.mark.parametrize("key_material", ["internal", "external"])
every_footer = pytest.mark.parametrize("plaintext_footer", [True, False], ids=["plaintext_footer", "encrypted"])

_KILOBYTES = np.random.default_rng(1).bytes(6_500 * 1024)
LARGE = pa.table({"a": [_KILOBYTES[n << 10 : n + 1 << 10] for n in range(6_500)], "b": ["text"] * 6_500})
"""6.5 MB of incompressible data: the store copies them."""

CASES = [("external", TABLE), ("internal", TABLE), ("internal", LARGE)]
every_case = pytest.mark.parametrize(("key_material", "table"), CASES, ids=["external", "internal", "copied"])

HEADERS = {
    "ContentType": "application/vnd.apache.parquet",
    "CacheControl": "no-store",
    "Metadata": {"owner": "risk"},
    "StorageClass": "STANDARD_IA",
    "ServerSideEncryption": "AES256",
}


class KilledError(BaseException):
    """Simulates the end of the process."""


def write(case: Case, table: pa.Table) -> Path:
    path = case.folder / "x.parquet"
    case.tools().write_table(table, path, row_group_size=max(250, len(table) // 4))
    return path


@dataclass
class S3Case:
    """A file in S3 whose master keys have a newer version."""

    store: S3Store
    case: Case
    filesystem: pafs.S3FileSystem
    table: pa.Table

    @classmethod
    def make(
        cls,
        store: S3Store,
        tmp_path: Path,
        *,
        table: pa.Table = TABLE,
        headers: dict[str, Any] | None = None,
        **settings: Any,
    ) -> S3Case:
        settings = {"column_keys": {"ka": ["a"], "kb": ["b"]}, **settings}
        case = Case.make(tmp_path, "keystore", **settings)
        path = write(case, table)
        made = cls(store, case, store.filesystem(), table)
        for file in (path, key_material_file(path)):
            if file.exists():
                store.put(f"d/{file.name}", file.read_bytes(), **(headers or {}))
        case.add_version()
        return made

    @property
    def tools(self) -> Keytools:
        return self.case.tools()

    @property
    def changing(self) -> str:
        """The key of the object that a rotation replaces."""
        is_external = self.case.settings.get("key_material") == "external"
        return "d/_KEY_MATERIAL_FOR_x.parquet.json" if is_external else "d/x.parquet"

    def rotate(self, **options: Any) -> FileRotation:
        report = self.tools.rotate(f"{BUCKET}/d/x.parquet", filesystem=self.filesystem, **options)
        (file,) = report.files
        return file

    def read(self) -> pa.Table:
        return self.tools.read_table(f"{BUCKET}/d/x.parquet", filesystem=self.filesystem)

    def assert_rotated(self) -> None:
        self.case.disable(1)
        assert self.read().equals(self.table)


# --- traffic ---


@every_footer
def test_little_of_a_large_file_travels(store: S3Store, tmp_path: Path, plaintext_footer: bool) -> None:
    # Many times the traffic limit; in a soak as large as real files.
    numbers = np.random.default_rng(7).integers(0, 2**62, 26_000_000 if SOAK else 800_000)
    table = pa.table({"a": numbers, "b": pa.repeat("text", len(numbers))})
    settings: dict[str, Any] = {"column_keys": {"ka": ["a"], "kb": ["b"]}, "plaintext_footer": plaintext_footer}
    case = Case.make(tmp_path, "keystore", **settings)
    path = case.folder / "x.parquet"
    case.tools().write_table(table, path, compression="none", use_dictionary=["b"])
    size_bytes = path.stat().st_size
    assert size_bytes > 8 * len(numbers)
    store.client.upload_file(str(path), BUCKET, "d/x.parquet")
    path.unlink()
    case.add_version()
    s3 = S3Case(store, case, store.filesystem(), table)
    before = store.proxy.bytes_moved
    started = time.perf_counter()
    result = s3.rotate()
    seconds = time.perf_counter() - started
    moved = store.proxy.bytes_moved - before
    print(f"\n{size_bytes:,} bytes: {moved:,} travelled, {result.bytes_written:,} of them new; {seconds:.1f} s")
    assert result.outcome is Outcome.ROTATED, result
    assert "copied by the store" in result.how
    assert moved < 1_000_000
    assert result.bytes_written < 100_000 and result.bytes_written + result.bytes_copied >= size_bytes - 10_000
    case.disable(1)
    assert s3.read().equals(table) and store.uploads() == []


# --- all kinds ---


@every_case
@every_footer
def test_everything_reads_when_the_old_version_is_disabled(
    store: S3Store, tmp_path: Path, key_material: str, table: pa.Table, plaintext_footer: bool
) -> None:
    headers = {**HEADERS, "Tagging": "team=risk&a+b=c%2Fd"}
    s3 = S3Case.make(
        store, tmp_path, table=table, headers=headers, key_material=key_material, plaintext_footer=plaintext_footer
    )
    before = store.client.head_object(Bucket=BUCKET, Key=s3.changing)
    tags = store.client.get_object_tagging(Bucket=BUCKET, Key=s3.changing)["TagSet"]
    assert len(tags) == 2
    result = s3.rotate()
    assert result.outcome is Outcome.ROTATED, result
    if key_material == "external":
        assert result.how == "new key material file"
    else:
        expected = "object sent whole" if table is TABLE else "new tail, data copied by the store"
        assert result.how == expected
    after = store.client.head_object(Bucket=BUCKET, Key=s3.changing)
    assert after["ETag"] != before["ETag"]
    assert {name: after.get(name) for name in HEADERS} == {name: before.get(name) for name in HEADERS}
    assert after["Metadata"] == {"owner": "risk"} and after["StorageClass"] == "STANDARD_IA"
    assert store.client.get_object_tagging(Bucket=BUCKET, Key=s3.changing)["TagSet"] == tags
    s3.assert_rotated()
    assert s3.rotate().outcome is Outcome.ALREADY_CURRENT
    assert store.uploads() == [] and len(store.names()) == (2 if key_material == "external" else 1)


def test_a_data_set(store: S3Store, tmp_path: Path) -> None:
    s3 = S3Case.make(store, tmp_path)
    data = store.get("d/x.parquet")
    for number in range(8):
        store.put(f"d/p={number % 3}/{number}.parquet", data)
    report = s3.tools.rotate(f"{BUCKET}/d", filesystem=s3.filesystem)
    assert report.counts == Counter({Outcome.ROTATED: 9}) and report.succeeded
    s3.case.disable(1)
    dataset = s3.tools.dataset(f"{BUCKET}/d", filesystem=s3.filesystem)
    assert dataset.to_table().num_rows == 9 * TABLE.num_rows


def test_the_store_copies_many_parts(store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_replacement, "PART_BYTES", 2 * LEAST_PART_BYTES)
    s3 = S3Case.make(store, tmp_path, table=pa.concat_tables([LARGE] * 4))
    copied: list[str] = []

    def note(operation: str, request: AWSPreparedRequest) -> None:
        if operation == "UploadPartCopy":
            copied.append(request.url)

    with on_request(s3.filesystem, note):
        assert s3.rotate().outcome is Outcome.ROTATED
    assert len(copied) == 3
    s3.assert_rotated()


@pytest.mark.parametrize(
    "beginning", [LEAST_PART_BYTES, 512 * 1024**2, 512 * 1024**2 + 1, 5 * 1024**4, 48 * 1024**4]
)
def test_parts_have_lengths_that_the_store_takes(beginning: int) -> None:
    bounds = s3_replacement.part_bounds(beginning)
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    assert bounds[0] == 0 and bounds[-1] == beginning and len(lengths) < 10_000
    assert min(lengths) >= LEAST_PART_BYTES and max(lengths) <= 5 * 1024**3


def test_the_etag_tells_objects_apart(store: S3Store) -> None:
    location = FileLocation(store.filesystem(), f"{BUCKET}/x")
    states = []
    for data in (b"1", b"2", b"1"):
        store.put("x", data)
        states.append(file_state(location))
    assert states[0] != states[1] and states[0] == states[2]
    with pytest.raises(FileNotFoundError):
        file_state(FileLocation(store.filesystem(), f"{BUCKET}/y"))


# --- other writers of the object ---


def mind_conditions(store: S3Store) -> Any:
    """Answer as AWS does, where moto ignores a condition."""

    def hook(operation: str, request: AWSPreparedRequest) -> AWSResponse | None:
        if operation not in ("PutObject", "UploadPartCopy", "CompleteMultipartUpload"):
            return None
        condition = etag_in(request)
        assert condition is not None, f"{operation} without a condition"
        if condition != store.client.head_object(Bucket=BUCKET, Key=key_in(request))["ETag"]:
            return refusal(request, 412, "PreconditionFailed")
        return None

    return hook


def test_data_of_another_object_is_not_taken() -> None:
    """A store that ignores the condition shows by the ETag whose bytes it sent; a cut answer has too few."""
    answers: list[dict[str, Any]] = []

    class Client:
        def get_object(self, **_: str) -> dict[str, Any]:
            return answers.pop()

    location = FileLocation(pafs.LocalFileSystem(), f"{BUCKET}/x")
    found = S3Object(Client(), location, '"1"', 10, {})
    for etag, data in (('"2"', b"12345"), ('"1"', b"1234"), ('"1"', b"123456")):
        answers.append({"ETag": etag, "Body": io.BytesIO(data)})
        with pytest.raises(ChangedMeanwhileError):
            read_object(found, 2, 7)
    answers.append({"ETag": '"1"', "Body": io.BytesIO(b"12345")})
    assert read_object(found, 2, 7) == b"12345"
    # The protocol has no empty range.
    assert read_object(found, 2, 2) == b"" and answers == []


@every_case
@pytest.mark.parametrize("last_moment", [True, False], ids=["minds_conditions", "overlooks_them"])
def test_an_update_by_somebody_else_is_not_lost(
    store: S3Store, tmp_path: Path, key_material: str, table: pa.Table, last_moment: bool
) -> None:
    """Somebody replaces the object just before the request that would."""
    s3 = S3Case.make(store, tmp_path, table=table, key_material=key_material)
    newer = s3.table = table.slice(0, len(table) - 100)
    newer_path = write(s3.case, newer)
    minds = mind_conditions(store)
    # In a store that ignores conditions, only the check before the request can detect this.
    moment = ("PutObject", "CompleteMultipartUpload") if last_moment else ("HeadObject",)
    seen: Counter[str] = Counter()

    def replace(operation: str, request: AWSPreparedRequest) -> AWSResponse | None:
        seen[operation] += 1
        if operation in moment and seen[operation] == (1 if last_moment else 2) and not seen["replaced"]:
            seen["replaced"] += 1
            for file in (key_material_file(newer_path), newer_path):
                if file.exists():
                    store.put(f"d/{file.name}", file.read_bytes())
        return minds(operation, request) if last_moment else None

    with on_request(s3.filesystem, replace):
        result = s3.rotate()
    assert seen["replaced"] == 1
    assert result.outcome is Outcome.ALREADY_CURRENT, result
    assert store.uploads() == []
    s3.assert_rotated()


def test_data_of_a_newer_object_is_not_copied(store: S3Store, tmp_path: Path) -> None:
    """Somebody replaces the object just before the store copies its data."""
    s3 = S3Case.make(store, tmp_path, table=LARGE)
    s3.table = LARGE.slice(0, len(LARGE) - 100)
    newer = write(s3.case, s3.table).read_bytes()
    minds = mind_conditions(store)
    seen: list[str] = []

    def replace(operation: str, request: AWSPreparedRequest) -> AWSResponse | None:
        if operation == "UploadPartCopy" and operation not in seen:
            store.put("d/x.parquet", newer)
        seen.append(operation)
        return minds(operation, request)

    with on_request(s3.filesystem, replace):
        result = s3.rotate()
    assert result.outcome is Outcome.ALREADY_CURRENT, result
    assert "CompleteMultipartUpload" not in seen and store.uploads() == []
    s3.assert_rotated()


@every_case
def test_somebody_who_never_stops_is_reported(
    store: S3Store, tmp_path: Path, key_material: str, table: pa.Table
) -> None:
    s3 = S3Case.make(store, tmp_path, table=table, key_material=key_material)
    minds = mind_conditions(store)
    turns = []

    def disturb(operation: str, request: AWSPreparedRequest) -> AWSResponse | None:
        if operation in ("PutObject", "CompleteMultipartUpload"):
            # The same keys in other bytes.
            data = store.get(s3.changing)
            if key_material == "external":
                turns.append(store.put(s3.changing, data + b" "))
            else:
                turns.append("")
                return refusal(request, 409, "ConditionalRequestConflict")
        return minds(operation, request)

    with on_request(s3.filesystem, disturb):
        result = s3.rotate()
    assert result.outcome is Outcome.FAILED and "constantly being changed by others" in str(result.error)
    assert len(turns) == 2 and store.uploads() == [] and s3.read().equals(table)


def test_an_object_that_is_removed_meanwhile(store: S3Store, tmp_path: Path) -> None:
    s3 = S3Case.make(store, tmp_path, table=LARGE)

    def remove(operation: str, request: AWSPreparedRequest) -> None:
        if operation == "UploadPart":
            store.client.delete_object(Bucket=BUCKET, Key="d/x.parquet")

    with on_request(s3.filesystem, remove):
        result = s3.rotate()
    assert (result.outcome, result.how) == (Outcome.NOTHING_TO_ROTATE, "removed meanwhile")
    assert store.names() == [] and store.uploads() == []


# --- runs that are cut off, and failures ---


@every_case
def test_killed_at_a_request(store: S3Store, tmp_path: Path, key_material: str, table: pa.Table) -> None:
    s3 = S3Case.make(store, tmp_path, table=table, key_material=key_material)
    originals = {key: store.get(key) for key in store.names()}
    point = 0
    while True:
        store.clear()
        for key, data in originals.items():
            store.put(key, data)
        sent: list[str] = []

        def kill(operation: str, request: AWSPreparedRequest, sent: list[str] = sent, point: int = point) -> None:
            # Nothing is sent from now on, as after the end of the process.
            sent.append(operation)
            if len(sent) > point:
                raise KilledError

        with on_request(s3.filesystem, kill):
            try:
                result = s3.rotate()
            except KilledError:
                result = None
        assert s3.read().equals(table), sent
        if result is not None:
            break
        if "PutObject" not in sent[:-1] and "CompleteMultipartUpload" not in sent[:-1]:
            assert store.get(s3.changing) == originals[s3.changing]
        again = s3.rotate()
        assert again.outcome in (Outcome.ROTATED, Outcome.ALREADY_CURRENT), (sent, again)
        assert s3.read().equals(table)
        assert store.names() == sorted(originals)
        point += 1 if SOAK else 2
    assert point >= (4 if table is TABLE else 7), sent
    s3.assert_rotated()


@pytest.mark.parametrize(
    "operation", ["CreateMultipartUpload", "UploadPartCopy", "UploadPart", "CompleteMultipartUpload"]
)
def test_a_store_that_refuses(store: S3Store, tmp_path: Path, operation: str) -> None:
    s3 = S3Case.make(store, tmp_path, table=LARGE)
    before = store.get("d/x.parquet")

    def refuse(asked: str, request: AWSPreparedRequest) -> AWSResponse | None:
        return refusal(request, 403, "AccessDenied") if asked == operation else None

    with on_request(s3.filesystem, refuse):
        result = s3.rotate()
    assert (result.outcome, result.error_class) == (Outcome.FAILED, "OutputError")
    assert "the store refuses: AccessDenied" in str(result.error)
    assert store.get("d/x.parquet") == before and store.uploads() == [] and store.names() == ["d/x.parquet"]


def test_a_store_that_is_overloaded_is_asked_again(
    store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # boto3 waits for up to a second before each request that it repeats.
    monkeypatch.setattr(botocore.retries.standard.ExponentialBackoff, "delay_amount", lambda *_: 0.01)
    s3 = S3Case.make(store, tmp_path, table=LARGE)
    refused: Counter[str] = Counter()

    def slow_down(operation: str, request: AWSPreparedRequest) -> AWSResponse | None:
        refused[operation] += 1
        return refusal(request, 503, "SlowDown") if refused[operation] == 1 else None

    with on_request(s3.filesystem, slow_down):
        assert s3.rotate().outcome is Outcome.ROTATED
    assert refused["UploadPartCopy"] == 2
    s3.assert_rotated()
    assert store.uploads() == []


@every_case
def test_an_answer_that_is_lost(
    store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key_material: str, table: pa.Table
) -> None:
    """The object was replaced, but the file is reported as failed: the next run finds it done, or repeats it."""
    s3 = S3Case.make(store, tmp_path, table=table, key_material=key_material)
    client = client_of(s3.filesystem)
    lost = []

    def losing(send: Any) -> Any:
        def lose(**arguments: Any) -> None:
            lost.append(send(**arguments))
            raise botocore.exceptions.ReadTimeoutError(endpoint_url="http://store")

        return lose

    with monkeypatch.context() as patched:
        for name in ("put_object", "complete_multipart_upload"):
            patched.setattr(client, name, losing(getattr(client, name)))
        result = s3.rotate()
    assert result.outcome is Outcome.FAILED and "cannot be reached" in str(result.error) and len(lost) == 1
    assert s3.read().equals(table)
    assert s3.rotate().outcome in (Outcome.ROTATED, Outcome.ALREADY_CURRENT)
    s3.assert_rotated()


@pytest.mark.parametrize(
    ("status", "code", "text"),
    [(403, "AccessDenied", "s3:GetObjectTagging"), (400, "InvalidRequest", "the store refuses: InvalidRequest")],
)
def test_tags_that_cannot_be_read_are_not_lost(
    store: S3Store, tmp_path: Path, status: int, code: str, text: str
) -> None:
    s3 = S3Case.make(store, tmp_path, headers={"Tagging": "team=risk"})
    before = store.client.head_object(Bucket=BUCKET, Key="d/x.parquet")["ETag"]

    def refuse(operation: str, request: AWSPreparedRequest) -> AWSResponse | None:
        return refusal(request, status, code) if operation == "GetObjectTagging" else None

    with on_request(s3.filesystem, refuse):
        result = s3.rotate()
    assert result.outcome is Outcome.FAILED and text in str(result.error)
    assert store.client.head_object(Bucket=BUCKET, Key="d/x.parquet")["ETag"] == before

    def unknown(operation: str, request: AWSPreparedRequest) -> AWSResponse | None:
        return refusal(request, 501, "NotImplemented") if operation == "GetObjectTagging" else None

    with on_request(s3.filesystem, unknown):
        assert s3.rotate().outcome is Outcome.ROTATED


@every_case
def test_a_store_without_conditions(store: S3Store, tmp_path: Path, key_material: str, table: pa.Table) -> None:
    s3 = S3Case.make(store, tmp_path, table=table, key_material=key_material)

    def unknown(operation: str, request: AWSPreparedRequest) -> AWSResponse | None:
        is_asked = operation in ("PutObject", "CompleteMultipartUpload") and etag_in(request) is not None
        return refusal(request, 501, "NotImplemented") if is_asked else None

    with on_request(s3.filesystem, unknown):
        assert s3.rotate().outcome is Outcome.ROTATED
    s3.assert_rotated()


def test_checksums_of_parts_go_into_the_new_object() -> None:
    """AWS refuses to complete an upload of parts with checksums unless the request names these."""
    answer = {
        "ETag": "e",
        "ChecksumCRC32": "c",
        "ChecksumSHA1": None,
        "LastModified": 1,
        "ChecksumType": "COMPOSITE",
    }
    assert s3_replacement.part_of_answer(3, answer) == {"PartNumber": 3, "ETag": "e", "ChecksumCRC32": "c"}


# --- without boto3, or with other rights ---


@every_key_material
def test_without_boto3(store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key_material: str) -> None:
    s3 = S3Case.make(store, tmp_path, table=LARGE, key_material=key_material)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "boto3" else find_spec(name, *rest)
    )
    result = s3.rotate()
    assert result.outcome is Outcome.ROTATED
    if key_material == "internal":
        assert result.how == "rewritten whole"
    monkeypatch.undo()
    s3.assert_rotated()


def test_rights_that_only_arrow_has(monkeypatch: pytest.MonkeyPatch) -> None:
    # Arrow asks for the credentials of the role, which nobody gives here.
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")

    def whole(*_: Any, **__: Any) -> Any:
        raise RuntimeError("written whole")

    monkeypatch.setattr(tail, "replacement", whole)
    place: dict[str, Any] = {"endpoint_override": "127.0.0.1:1", "scheme": "http", "region": "us-east-1"}
    for options in ({"anonymous": True}, {"role_arn": "arn:aws:iam::111122223333:role/r"}):
        location = FileLocation(pafs.S3FileSystem(**options, **place), f"{BUCKET}/x")
        assert not copies_in_store(location)
        with pytest.raises(RuntimeError, match="written whole"):
            tail.replace_tail(location, Tail(8, 4, b"PAR1", ()), b"", lambda _: None)


def test_file_systems_share_a_client_where_they_have_the_same_rights(store: S3Store) -> None:
    assert client_of(store.filesystem()) is client_of(store.filesystem())
    assert client_of(store.filesystem()) is not client_of(store.filesystem(access_key="other"))


def test_a_fork_has_a_client_of_its_own(store: S3Store) -> None:
    filesystem = store.filesystem()
    ours = id(client_of(filesystem))
    child = os.fork()
    if child == 0:
        os._exit(0 if id(client_of(filesystem)) != ours else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
