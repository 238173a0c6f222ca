"""Encrypted files, served as plain Parquet: all output is authentic, and nothing of refused columns is sent."""

from __future__ import annotations

import contextlib
import hmac
import http.client
import io
import os
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from botocore.exceptions import ClientError
from soak import how_many
from unit.serve.serving import ask, asked, client_of, connected, opened_by
from view_case import ViewCase

from parquet_keytools import Keytools, SecretBytes
from parquet_keytools.errors import KeytoolsError, KmsUnavailableError
from parquet_keytools.kms.contract_tests import wrap_one
from parquet_keytools.serve.fuse_mount import MountedTree
from parquet_keytools.serve.served_tree import ServedTree
from parquet_keytools.serve.view_server import ViewServer

SECRETS = [f"Person No. {os.urandom(9).hex()}" for _ in range(3_000)]
TABLE = pa.table(
    {
        "id": list(range(30_000)),
        "place": [{"city": f"city {row % 10}", "zip": row} for row in range(30_000)],
        "name": SECRETS * 10,
    }
)
OPTIONS = {
    "row_group_size": 5_000,
    "data_page_size": 20_000,
    "write_page_index": True,
    "use_dictionary": ["name"],
    "compression": "none",
}


@pytest.fixture
def case(tmp_path: Path) -> ViewCase:
    made = ViewCase(tmp_path, {"column_keys": {"secret": ["name"]}, "unlisted_columns": "footer_key"})
    sink = io.BytesIO()
    pq.write_table(TABLE, sink, **OPTIONS)
    (tmp_path / "data").mkdir()
    plain = tmp_path / "plain.parquet"
    plain.write_bytes(sink.getvalue())
    made.keytools().encrypt_file(plain, tmp_path / "data" / "x.parquet")
    return made


def server_of(keytools: Keytools, folder: Path, **options: bool) -> ViewServer:
    return ViewServer(ServedTree(keytools.view(folder), folder=folder), **options)


def test_every_range_is_the_slice_of_the_whole(case: ViewCase) -> None:
    whole = case.keytools().open(case.folder / "data" / "x.parquet").read()
    assert pq.read_table(io.BytesIO(whole)).equals(TABLE)

    def wrong(server: ViewServer, seed: int) -> list[tuple[int, int]]:
        chance = random.Random(seed)
        found = []
        with contextlib.closing(connected(server)) as connection:
            for _ in range(how_many(320, 100_000) // 64):
                start = chance.randrange(len(whole))
                end = min(len(whole), start + chance.choice([1, 10, 1_000, 100_000]))
                headers = {"Range": f"bytes={start}-{end - 1}"}
                status, _, body = asked(connection, server, "x.parquet", headers=headers)
                if (status, body) != (206, whole[start:end]):
                    found.append((start, end))
        return found

    with server_of(case.keytools(), case.folder / "data") as server, ThreadPoolExecutor(64) as pool:
        assert ask(server, "x.parquet")[2] == whole
        assert [bad for found in pool.map(wrong, [server] * 64, range(64)) for bad in found] == []
        scan = pl.scan_parquet(server.url + "x.parquet")
        assert scan.filter(pl.col("id") < 10).select("name").collect()["name"].to_list() == SECRETS[:10]


@pytest.mark.parametrize("denied_columns", ["error", "hide", "null"])
def test_nothing_of_a_refused_column_is_served(case: ViewCase, denied_columns: str) -> None:
    case.kms.deny("secret")
    served = []
    with server_of(case.keytools(denied_columns=denied_columns), case.folder / "data", with_s3=True) as server:
        _, headers, _ = ask(server, "x.parquet", "HEAD")
        size = int(headers["Content-Length"])
        statuses = set()
        for start in range(0, size, 50_000):
            headers = {"Range": f"bytes={start}-{start + 49_999}"}
            status, found, body = ask(server, "x.parquet", headers=headers)
            statuses.add(status)
            served.append(repr(found).encode() + body)
        status, _, whole = ask(server, "x.parquet")
        columns = {"error": ["id", "place"], "hide": None, "null": None}[denied_columns]
        assert status == 200 and statuses <= {206, 403}
        table = pq.read_table(io.BytesIO(whole), columns=columns)
        assert table.column_names == ["id", "place", "name"][: 3 if denied_columns == "null" else 2]
        assert table.select(["id", "place"]).equals(TABLE.select(["id", "place"]))
        scan = pl.scan_parquet(server.url + "x.parquet")
        if denied_columns == "null":
            assert scan.select(pl.col("name").null_count()).collect().item() == len(TABLE)
        else:
            with pytest.raises((pl.exceptions.PolarsError, PermissionError)):
                scan.select("name").collect()
        served.append(whole)
        served.append(ask(server, "")[2])
    everything = b"".join(served)
    assert b"Person No." not in everything


def test_nothing_of_a_column_that_is_shown_as_digests_is_served(case: ViewCase) -> None:
    wrapped = wrap_one(case.kms, SecretBytes(bytes(32)), "footer")
    case.more = {"hash_keys": {"p": {"master_key": "footer", "wrapped_key": wrapped}}}
    case.table["hash_key"] = "p"
    digests = [hmac.digest(bytes(32), b"string\0" + name.encode(), "sha256")[:16].hex() for name in SECRETS]
    folder = case.folder / "data"
    with server_of(case.keytools(denied_columns="hash"), folder, with_s3=True) as server:
        _, headers, _ = ask(server, "x.parquet", "HEAD")
        status, _, whole = ask(server, "x.parquet")
        served = [whole, ask(server, "")[2]]
        assert status == 200 and int(headers["Content-Length"]) == len(whole)
        chance = random.Random(5)
        for _ in range(50):
            start = chance.randrange(len(whole) - 100_000)
            _, _, part = ask(server, "x.parquet", headers={"Range": f"bytes={start}-{start + 99_999}"})
            assert part == whole[start : start + 100_000]
        assert pq.read_table(io.BytesIO(whole))["name"].to_pylist() == digests * 10
        scan = pl.scan_parquet(server.url + "x.parquet")
        assert scan.filter(pl.col("name") == digests[7]).select(pl.len()).collect().item() == 10
        assert scan.filter(pl.col("name") == SECRETS[7]).select(pl.len()).collect().item() == 0
        served.append(ask(server, "x.parquet", headers={"Range": "bytes=-200000"})[2])
    assert b"Person No." not in b"".join(served)


def test_an_altered_page_ends_the_answer(case: ViewCase) -> None:
    path = case.folder / "data" / "x.parquet"
    whole = case.keytools().open(path).read()
    content = bytearray(path.read_bytes())
    place = 1_200_000
    assert place < len(content) - 200_000
    content[place] ^= 1
    path.write_bytes(content)
    with server_of(case.keytools(), path.parent) as server:
        with pytest.raises(http.client.IncompleteRead) as caught:
            ask(server, "x.parquet")
        got = caught.value.partial
        assert 0 < len(got) <= place and whole.startswith(got)
        status, _, body = ask(server, "x.parquet", headers={"Range": f"bytes={place}-{place}"})
        assert status == 422 and b"x.parquet" in body
        after = place + 100_000
        assert (
            ask(server, "x.parquet", headers={"Range": f"bytes={after}-{after + 9}"})[2]
            == whole[after : after + 10]
        )


def test_what_lies_before_an_altered_last_page_is_served(case: ViewCase) -> None:
    path = case.folder / "data" / "x.parquet"
    whole = case.keytools().open(path).read()
    content = bytearray(path.read_bytes())
    metadata = pq.read_metadata(io.BytesIO(whole))
    last = metadata.row_group(metadata.num_row_groups - 1).column(3)
    place = last.dictionary_page_offset + last.total_compressed_size - 1_000
    content[place] ^= 1
    path.write_bytes(content)
    with server_of(case.keytools(), path.parent) as server:
        assert ask(server, "x.parquet", "HEAD")[0] == 200
        assert ask(server, "x.parquet", headers={"Range": "bytes=100-200"})[2] == whole[100:201]
        assert ask(server, "x.parquet", headers={"Range": "bytes=-1000"})[2] == whole[-1000:]
        assert ask(server, "x.parquet", headers={"Range": f"bytes={place}-{place + 9}"})[0] == 422


def test_a_kms_that_goes_away(case: ViewCase) -> None:
    keytools = case.keytools()
    with server_of(keytools, case.folder / "data") as server:
        assert ask(server, "x.parquet", headers={"Range": "bytes=0-3"})[2] == b"PAR1"
        keytools.clear_caches()
        case.kms.deny("footer")
        (case.folder / "data" / "x.parquet").touch()
        status, _, body = ask(server, "x.parquet", headers={"Range": "bytes=0-3"})
        assert (status, b"PAR1" in body) == (403, False)


@pytest.mark.parametrize("cache_lifetime_seconds", [0, 600])
def test_without_its_kms_open_files_go_on_and_others_wait(
    case: ViewCase, cache_lifetime_seconds: int, caplog: pytest.LogCaptureFixture
) -> None:
    case.keytools().encrypt_file(case.folder / "plain.parquet", case.folder / "data" / "y.parquet")
    keytools = case.keytools(cache_lifetime_seconds=cache_lifetime_seconds)
    whole = keytools.open(case.folder / "data" / "x.parquet").read()
    keytools.clear_caches()
    with server_of(keytools, case.folder / "data", with_s3=True) as server, pytest.MonkeyPatch.context() as patch:
        tree = ServedTree(keytools.view(case.folder / "data"), folder=case.folder / "data")
        mounted = MountedTree(tree, lambda: None)
        handle = opened_by(mounted, "/x.parquet")
        file = tree.find("x.parquet")
        assert ask(server, "x.parquet", headers={"Range": "bytes=0-3"})[0] == 206
        with tree.open(file) as read:
            patch.setattr(case.kms, "_unwrap", unreachable)
            keytools.clear_caches()
            assert read(1_000_000, 100_000) == whole[1_000_000:1_100_000]
        assert mounted.read("/x.parquet", 100_000, 500_000, handle) == whole[500_000:600_000]
        status, _, body = ask(server, "x.parquet", headers={"Range": "bytes=500000-500099"})
        held = (206, whole[500_000:500_100])
        assert (status, body) == held if cache_lifetime_seconds else status == 503
        for _ in range(2):
            status, headers, body = ask(server, "y.parquet")
            assert (status, headers["Retry-After"], b"unreachable here" in body) == (503, "5", True)
        with pytest.raises(OSError, match="Input/output error"):
            opened_by(mounted, "/y.parquet")
        patch.undo()
        assert pq.read_table(io.BytesIO(ask(server, "y.parquet")[2])).equals(TABLE)
    assert [r.levelname for r in caplog.records if "unreachable here" in r.getMessage()][:2] == ["WARNING"] * 2


def unreachable(wrapped_key: str, master_key_id: str) -> SecretBytes:
    raise KmsUnavailableError(
        "unreachable here", backend="in_memory", operation="unwrap", master_key_id=master_key_id
    )


def test_a_replaced_file_has_another_etag_whatever_its_times(case: ViewCase) -> None:
    path = case.folder / "data" / "x.parquet"
    with server_of(case.keytools(), path.parent) as server:
        former = ask(server, "x.parquet", "HEAD")[1]["ETag"]
        times = path.stat()
        case.keytools().encrypt_file(case.folder / "plain.parquet", path, overwrite=True)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert path.stat().st_size == times.st_size
        status, headers, _ = ask(server, "x.parquet", headers={"If-Match": former, "Range": "bytes=0-3"})
        assert status == 412 and headers["ETag"] != former


def test_rights_that_change_change_the_etag(case: ViewCase) -> None:
    with server_of(case.keytools(denied_columns="hide", cache_lifetime_seconds=0), case.folder / "data") as server:
        former = ask(server, "x.parquet", "HEAD")[1]["ETag"]
        case.kms.deny("secret")
        status, headers, _ = ask(server, "x.parquet", headers={"If-Match": former, "Range": "bytes=0-3"})
        assert (status, headers["ETag"] != former) == (412, True)


def test_pipes_and_odd_prefixes_do_not_spoil_listings(case: ViewCase) -> None:
    folder = case.folder / "data"
    os.mkfifo(folder / "pipe.parquet")
    (folder / "loop").symlink_to("loop")
    view = case.keytools().view(folder)
    assert view.info("pipe.parquet")["type"] == "other"
    tree = ServedTree(view, folder=folder)
    files = [path.name for path in sorted(folder.glob("x*.parquet"))]
    assert list(tree.keys("")) == files
    assert [list(tree.keys(odd)) for odd in ("\0", "loop", "/etc", "n" * 300)] == [[]] * 4
    with server_of(case.keytools(), folder) as server:
        assert ask(server, "pipe.parquet")[0] == 404


def test_a_name_that_is_no_text_is_an_error_that_names_it(case: ViewCase) -> None:
    folder = case.folder / "data"
    odd = ["per%41cent.parquet", " q?u#x&'.parquet", "\u202ertl.parquet", "back\\slash.parquet"]
    for name in odd:
        case.keytools().encrypt_file(case.folder / "plain.parquet", folder / name)
    with server_of(case.keytools(), folder) as server:
        links = re.findall('href="(.*?)"', ask(server, "")[2].decode())
        assert sorted(map(unquote, links)) == sorted([*odd, "x.parquet"])
        assert [ask(server, link, "HEAD")[0] for link in links] == [200] * 5
        os.rename(folder / "x.parquet", os.fsencode(folder) + b"/bad\xff.parquet")  # noqa: PTH104
        status, _, body = ask(server, "")
        assert (status, b"a name is not valid UTF-8" in body) == (422, True)


@pytest.mark.parametrize("content", [b"my thoughts", b"PAR1 no parquet PAR1"])
def test_what_is_no_encrypted_file_is_not_served(case: ViewCase, content: bytes) -> None:
    folder = case.folder / "data"
    (folder / "notes.txt").write_bytes(content)
    pq.write_table(TABLE.select(["name"]), folder / "plaintext.parquet")
    is_parquet = content.startswith(b"PAR1")
    with server_of(case.keytools(), folder, with_s3=True) as server:
        for name, expected in (("notes.txt", 422 if is_parquet else 404), ("plaintext.parquet", 422)):
            status, _, body = ask(server, name)
            assert (status, content in body or b"Person" in body) == (expected, False)
        # Possible data is listed, so that clients that copy everything fail and miss nothing.
        listed = re.findall('href="(.*?)"', ask(server, "")[2].decode())
        assert listed == [*["notes.txt"] * is_parquet, "plaintext.parquet", "x.parquet"]
        scan = pl.scan_parquet(
            "s3://view/x*.parquet",
            storage_options={
                "aws_endpoint_url": server.endpoint,
                "aws_access_key_id": server.key_pair.access_key_id,
                "aws_secret_access_key": server.key_pair.secret.reveal().decode(),
                "aws_region": "us-east-1",
                "aws_allow_http": "true",
            },
        )
        assert scan.select(pl.len()).collect().item() == 30_000


LEFT_OUT = [
    "_SUCCESS",
    ".x.parquet.crc",
    ".hidden.parquet",
    "_metadata",
    "_KEY_MATERIAL_FOR_x.parquet.json",
    "_KEY_MATERIAL_FOR_gone.parquet.json",
    "_KEY_MATERIAL_FOR_a=1.parquet.json",
    "README.md",
    "empty",
    "_delta_log/00000.json",
    "_temporary/0/part-0.parquet",
    ".staging/x.parquet",
    "month=1/_SUCCESS",
]


def test_clients_that_copy_everything_get_what_is_listed(case: ViewCase) -> None:
    folder = case.folder / "data"
    keys = ["_year=2/part-0", "month=1/a.parquet", "x.parquet"]
    for key in keys[:2]:
        (folder / key).parent.mkdir()
        case.keytools().encrypt_file(case.folder / "plain.parquet", folder / key)
    for name in LEFT_OUT:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"" if name == "empty" else b"any text")
    with (
        server_of(case.keytools(), folder, with_s3=True) as server,
        contextlib.closing(client_of(server)) as client,
    ):
        for listing in ("list_objects", "list_objects_v2"):
            pages = client.get_paginator(listing).paginate(Bucket="view", PaginationConfig={"PageSize": 2})
            found = {item["Key"]: item for page in pages for item in page["Contents"]}
            assert list(found) == keys
            for key, item in found.items():
                answer = client.get_object(Bucket="view", Key=key)
                assert len(answer["Body"].read()) == item["Size"]
        folders = client.list_objects(Bucket="view", Delimiter="/")["CommonPrefixes"]
        assert [item["Prefix"] for item in folders] == ["_year=2/", "month=1/"]
        assert re.findall('href="(.*?)"', ask(server, "")[2].decode()) == ["_year%3D2/", "month%3D1/", "x.parquet"]
        assert {ask(server, name)[0] for name in (*LEFT_OUT, "_delta_log/", ".staging")} == {404}
        with pytest.raises(client.exceptions.NoSuchKey):
            client.get_object(Bucket="view", Key="_SUCCESS")
    mounted = MountedTree(ServedTree(case.keytools().view(folder), folder=folder), lambda: None)
    assert [name for name, _, _ in mounted.readdir("/", 0)] == [".", "..", "_year=2", "month=1", "x.parquet"]
    with pytest.raises(OSError, match="No such file"):
        mounted.getattr("/_SUCCESS")


def test_errors_show_paths_as_they_are_served(case: ViewCase, tmp_path: Path) -> None:
    folder = case.folder / "data"
    (folder / "part").mkdir()
    keytools = case.keytools()
    keytools.encrypt_file(case.folder / "plain.parquet", folder / "part" / "altered.parquet")
    (folder / "part" / "footer.parquet").write_bytes((folder / "part" / "altered.parquet").read_bytes())
    (folder / "part" / "short.parquet").write_bytes(b"PARE short")
    for name, place in (("altered", 1_200_000), ("footer", -100)):
        content = bytearray((folder / "part" / f"{name}.parquet").read_bytes())
        content[place] ^= 1
        (folder / "part" / f"{name}.parquet").write_bytes(content)
    pq.write_table(TABLE.select(["name"]), folder / "part" / "plaintext.parquet")
    foreign = pa.table({"name": ["x"], "more": [1]})
    case.table["column_keys"] = {"secret": ["more"]}
    case.keytools().write_table(foreign, folder / "part" / "foreign.parquet")
    case.table["column_keys"] = {"secret": ["name"]}
    names = ["altered", "footer", "short", "plaintext", "foreign", "unreachable", "damaged"]
    view = keytools.view(folder)
    open_below = view.open

    def failing(path: str, *rest: object, **options: object) -> object:
        if "unreachable" in path:
            text = f"{tmp_path / 'keystore.json'} is locked, as is {folder / 'part'}"
            raise KmsUnavailableError(text, backend="x", operation="unwrap", master_key_id="k")
        if "damaged" in path:
            raise KeytoolsError(f"file:{folder}/part and {folder / path}, hidden in C:\\data")
        return open_below(path, *rest, **options)

    for name in ("unreachable", "damaged"):
        (folder / "part" / f"{name}.parquet").write_bytes(b"PARE")
    view.open = failing
    tree = ServedTree(view, folder=folder)
    with ViewServer(tree, with_s3=True) as server, contextlib.closing(client_of(server)) as client:
        for name in names:
            key = f"part/{name}.parquet"
            range_ = "bytes=1200000-1200010" if name == "altered" else "bytes=0-3"
            status, headers, body = ask(server, key, headers={"Range": range_})
            assert status in (422, 503), name
            with pytest.raises(ClientError) as caught:
                client.get_object(Bucket="view", Key=key, Range=range_)
            for text in (body.decode(), repr(headers), repr(caught.value.response), str(caught.value)):
                assert str(tmp_path) not in text and "C:" not in text, name
            if name not in ("unreachable", "damaged"):
                assert key in body.decode()
