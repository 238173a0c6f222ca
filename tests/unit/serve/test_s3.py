"""The server as S3: signatures as botocore makes them, listings, and what is refused."""

from __future__ import annotations

import http.client
import random
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

import boto3
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import fs as pafs
from unit.serve.serving import ask, client_of, memory_files, said, served, tree_of

from parquet_keytools.serve.requests_and_answers import (
    KeyPair,
    RefusedRequestError,
    ServedRequest,
    check_signature,
)
from parquet_keytools.serve.view_server import ViewServer

FILES = {"2013/a.parquet": b"content of a", "2013/b+c d&ü'.parquet": b"content of b", "2014/x/y.parquet": b"yy"}


def test_boto3_reads() -> None:
    with served(FILES, with_s3=True) as server, closing(client_of(server)) as client:
        assert [bucket["Name"] for bucket in client.list_buckets()["Buckets"]] == ["view"]
        client.head_bucket(Bucket="view")
        client.get_bucket_location(Bucket="view")
        listed = client.list_objects_v2(Bucket="view")
        assert {item["Key"]: item["Size"] for item in listed["Contents"]} == {k: len(v) for k, v in FILES.items()}
        for item in listed["Contents"]:
            found = client.get_object(Bucket="view", Key=item["Key"], IfMatch=item["ETag"])
            assert (found["Body"].read(), found["ETag"]) == (FILES[item["Key"]], item["ETag"])
            part = client.get_object(Bucket="view", Key=item["Key"], Range="bytes=-2")
            assert part["Body"].read() == FILES[item["Key"]][-2:]
            assert client.head_object(Bucket="view", Key=item["Key"])["ContentLength"] == len(FILES[item["Key"]])


def test_a_listing_opens_files_anew() -> None:
    """Clients that listed a folder know sizes and ETags, and send no HEAD."""
    filesystem, key = memory_files(FILES), "2014/x/y.parquet"
    with served(filesystem, with_s3=True) as server, closing(client_of(server)) as client:
        assert client.get_object(Bucket="view", Key=key, Range="bytes=0-0")["Body"].read() == b"y"
        filesystem.pipe_file(f"/root/{key}", b"zz")
        with pytest.raises(ClientError) as caught:
            client.get_object(Bucket="view", Key=key, Range="bytes=1-1")
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 412
        client.list_objects_v2(Bucket="view", Prefix="2014/")
        assert client.get_object(Bucket="view", Key=key, Range="bytes=1-1")["Body"].read() == b"z"


def test_pyarrow_reads() -> None:
    table = pa.table({"a": range(1_000)})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    files = {f"2013/month={month} ü+/x.parquet": sink.getvalue().to_pybytes() for month in range(3)}
    with served(files, with_s3=True) as server:
        pair, place = server.key_pair, urlsplit(server.endpoint)
        filesystem = pafs.S3FileSystem(
            access_key=pair.access_key_id,
            secret_key=pair.secret.reveal().decode(),
            endpoint_override=place.netloc,
            scheme=place.scheme,
            region="us-east-1",
        )
        kinds = [info.type.name for info in filesystem.get_file_info(["view", "view/2013", "view/2013/none"])]
        assert kinds == ["Directory", "Directory", "NotFound"]
        found = filesystem.get_file_info(pafs.FileSelector("view", recursive=True))
        assert sorted(info.path for info in found if info.is_file) == sorted(f"view/{key}" for key in files)
        data = ds.dataset("view/2013", filesystem=filesystem, format="parquet", partitioning="hive")
        assert data.count_rows() == 3_000
        assert data.to_table(filter=pc.field("month") == "1 ü+", columns=["a"]).equals(table)
        with pytest.raises(OSError):
            filesystem.delete_file(f"view/{next(iter(files))}")


@pytest.mark.parametrize(
    ("ask", "status", "code"),
    [
        (lambda client: client.get_object(Bucket="view", Key="other"), 404, "NoSuchKey"),
        (lambda client: client.get_object(Bucket="view", Key="../root/2013/a.parquet"), 404, "NoSuchKey"),
        (lambda client: client.get_object(Bucket="view", Key="2013"), 404, "NoSuchKey"),
        (lambda client: client.get_object(Bucket="other", Key="x"), 404, "NoSuchBucket"),
        (lambda client: client.list_objects_v2(Bucket="other"), 404, "NoSuchBucket"),
        (
            lambda client: client.get_object(Bucket="view", Key="2013/a.parquet", IfMatch='"x"'),
            412,
            "PreconditionFailed",
        ),
        (
            lambda client: client.get_object(Bucket="view", Key="2013/a.parquet", Range="bytes=99-"),
            416,
            "InvalidRange",
        ),
        (lambda client: client.put_object(Bucket="view", Key="x", Body=b"x"), 405, "MethodNotAllowed"),
        (lambda client: client.delete_object(Bucket="view", Key="2013/a.parquet"), 405, "MethodNotAllowed"),
        (lambda client: client.create_bucket(Bucket="new"), 405, "MethodNotAllowed"),
        (lambda client: client.get_bucket_acl(Bucket="view"), 501, "NotImplemented"),
        (lambda client: client.get_object_tagging(Bucket="view", Key="2013/a.parquet"), 501, "NotImplemented"),
        (
            lambda client: client.get_object(Bucket="view", Key="2013/a.parquet", ResponseContentType="text/html"),
            501,
            "NotImplemented",
        ),
        (lambda client: client.list_objects_v2(Bucket="view", Delimiter="a"), 501, "NotImplemented"),
    ],
)
def test_what_is_refused(ask: Callable[[Any], object], status: int, code: str) -> None:
    with served(FILES, with_s3=True) as server, closing(client_of(server)) as client:
        with pytest.raises(ClientError) as caught:
            ask(client)
        answer = caught.value.response
        assert (answer["ResponseMetadata"]["HTTPStatusCode"], answer["Error"]["Code"]) == (status, code)


@pytest.mark.parametrize("wrong", ["key", "secret"])
def test_other_credentials_are_refused(wrong: str) -> None:
    with served(FILES, with_s3=True) as server:
        own, other = server.key_pair, KeyPair()
        assert own is not None and own.access_key_id != other.access_key_id
        pair = (
            KeyPair(own.access_key_id, other.secret)
            if wrong == "secret"
            else KeyPair(other.access_key_id, own.secret)
        )
        with closing(client_of(server, pair)) as client, pytest.raises(ClientError) as caught:
            client.list_objects_v2(Bucket="view")
        code = {"key": "InvalidAccessKeyId", "secret": "SignatureDoesNotMatch"}[wrong]
        assert caught.value.response["Error"]["Code"] == code


def test_without_a_signature_nothing_is_answered() -> None:
    with (
        served(FILES, with_s3=True) as server,
        closing(http.client.HTTPConnection(urlsplit(server.url).netloc)) as raw,
    ):
        for path in ("/", "/view", "/view/2013/a.parquet", "/view/none", "/other/x"):
            raw.request("GET", path)
            answer = raw.getresponse()
            assert (answer.status, b"AccessDenied" in answer.read()) == (403, True)


def test_a_parameter_that_is_there_twice_is_refused() -> None:
    with served(FILES, with_s3=True) as server:
        pair = server.key_pair
        credentials = Credentials(pair.access_key_id, pair.secret.reveal().decode())
        request = AWSRequest("GET", server.endpoint + "/view?list-type=2&prefix=2013&prefix=2014")
        request.headers["Host"] = urlsplit(server.endpoint).netloc
        S3SigV4Auth(credentials, "s3", "us-east-1").add_auth(request)
        raw = urllib.request.Request(request.url, headers=dict(request.headers.items()))
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(raw)
        assert (caught.value.code, b"prefix" in caught.value.read()) == (400, True)


def test_signatures_of_version_2_are_named() -> None:
    with served(FILES, with_s3=True) as server:
        pair = server.key_pair
        client = boto3.client(
            "s3",
            endpoint_url=server.endpoint,
            aws_access_key_id=pair.access_key_id,
            aws_secret_access_key=pair.secret.reveal().decode(),
            region_name="us-east-1",
            config=Config(signature_version="s3", retries={"max_attempts": 1}),
        )
        with closing(client), pytest.raises(ClientError, match="Authorization header") as caught:
            client.get_object(Bucket="view", Key="2013/a.parquet")
        assert caught.value.response["Error"]["Code"] == "AuthorizationHeaderMalformed"
        url = client.generate_presigned_url("get_object", {"Bucket": "view", "Key": "2013/a.parquet"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(url)
        assert (refused.value.code, b"not signed in its headers" in refused.value.read()) == (403, True)


def signed_bytes(server: ViewServer, target: str, **headers: str) -> bytes:
    """Return a request signed by a client that does not encode the path."""
    pair, host = server.key_pair, urlsplit(server.endpoint).netloc
    assert pair is not None
    request = AWSRequest("GET", server.endpoint + target, headers={"Host": host, **headers})
    S3SigV4Auth(Credentials(pair.access_key_id, pair.secret.reveal().decode()), "s3", "us-east-1").add_auth(
        request
    )
    lines = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    return f"GET {target} HTTP/1.1\r\n{lines}Connection: close\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/view/2013/a.parquet", 200),
        ("/%76iew/2013%2Fa.parquet", 403),
        ("//view/2013/a.parquet", 404),
        ("/view//2013/a.parquet", 404),
        ("/view/./2013/a.parquet", 404),
        ("/view/x/../2013/a.parquet", 404),
        ("/view/%2e%2e/root/2013/a.parquet", 403),
        ("/other/../view/2013/a.parquet", 404),
        ("/view/2013/a.parquet?versionId=1", 501),
        ("/view/2013/a.parquet?X-Amz-Signature=0", 501),
    ],
)
def test_a_path_means_one_thing(target: str, status: int) -> None:
    with served(FILES, with_s3=True) as server:
        assert said(server, signed_bytes(server, target)).startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (lambda raw: raw, 206),
        # Signed parts stay unchanged, and nothing similar is added.
        (lambda raw: raw.replace(b"bytes=0-3", b"bytes=0-9"), 403),
        (lambda raw: raw.replace(b"\r\n", b"\r\nRange: bytes=5-9\r\n", 1), 403),
        (lambda raw: raw.replace(b"\r\n", b"\r\nX-Amz-Security-Token: x\r\n", 1), 403),
        (lambda raw: raw.replace(b"\r\n", b"\r\nX-Amz-Date: 20200101T000000Z\r\n", 1), 400),
        (lambda raw: raw.replace(b"\r\n", b"\r\nAuthorization: AWS4-HMAC-SHA256 x\r\n", 1), 400),
        (lambda raw: raw.replace(b"GET ", b"HEAD "), 403),
        (lambda raw: raw.replace(b"GET /view", b"GET http://HOST/view"), 400),
        (lambda raw: raw.replace(b"\r\n", b"\r\nContent-Length: 3\r\n", 1) + b"abc", 400),
        (lambda raw: raw.replace(b"\r\n", b"\r\nTransfer-Encoding: chunked\r\n", 1) + b"0\r\n\r\n", 400),
        (lambda raw: raw.replace(b"Host: ", b"Host: a."), 421),
    ],
)
def test_a_signed_request_is_not_sent_again_with_changes(change: Callable[[bytes], bytes], status: int) -> None:
    with served(FILES, with_s3=True) as server:
        raw = change(signed_bytes(server, "/view/2013/a.parquet", Range="bytes=0-3"))
        answer = said(server, raw)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert answer.count(b"HTTP/1.1") == 1
        assert (FILES["2013/a.parquet"][:4] in answer.partition(b"\r\n\r\n")[2]) == (status == 206)


def test_who_has_signed_keeps_the_connection() -> None:
    with served(FILES, with_s3=True, max_connections=1) as server, closing(client_of(server)) as client:
        client.list_buckets()
        assert said(server, b"").startswith(b"HTTP/1.1 503 ")


class OneIsOdd(MemoryFileSystem):
    """A file system in which one file cannot be opened."""

    error: OSError | None = None

    def _open(self, path: str, *arguments: Any, **options: Any) -> Any:
        if self.error and path.endswith("/odd"):
            raise self.error
        return super()._open(path, *arguments, **options)


@pytest.mark.parametrize(
    ("error", "expected"),
    [(PermissionError(13, "no"), ["a", "odd"]), (FileNotFoundError(2, "gone"), ["a"])],
    ids=["refused", "removed"],
)
def test_one_file_does_not_spoil_the_listing_of_others(error: OSError, expected: list[str]) -> None:
    filesystem = type("_Files", (OneIsOdd,), {"store": {}, "pseudo_dirs": [""], "cachable": False})()
    for name in ("a", "odd", "no-xml-\ufffe"):
        filesystem.pipe_file(f"/root/{name}", b"x")
    filesystem.error = error
    with served(filesystem, with_s3=True) as server, closing(client_of(server)) as client:
        listed = client.list_objects_v2(Bucket="view")
        assert ([item["Key"] for item in listed["Contents"]], listed["KeyCount"]) == (expected, len(expected))


def test_s3_is_closed_unless_it_is_asked_for() -> None:
    with served(FILES) as server, closing(http.client.HTTPConnection(urlsplit(server.url).netloc)) as raw:
        raw.request("GET", "/view/2013/a.parquet")
        assert raw.getresponse().status == 404
        assert server.key_pair is None


# --- signatures, in detail ---

PAIR = KeyPair()
URL = "http://127.0.0.1:9/view/a%20b/%C3%BC?list-type=2&prefix=a%2Fb%20c&empty="


def signed(**headers: str) -> ServedRequest:
    """Return a request that botocore has signed."""
    credentials = Credentials(PAIR.access_key_id, PAIR.secret.reveal().decode())
    request = AWSRequest("GET", URL, headers={"Host": "127.0.0.1:9", **headers})
    S3SigV4Auth(credentials, "s3", "us-east-1").add_auth(request)
    url = urlsplit(request.url)
    found = {name.lower(): (value,) for name, value in request.headers.items()}
    return ServedRequest("GET", url.path, url.query, found)


def changed(request: ServedRequest, **changes: Any) -> ServedRequest:
    return ServedRequest(**{**vars(request), **changes})


def with_header(request: ServedRequest, name: str, change: Callable[[str], str | None]) -> ServedRequest:
    value = change(request.headers.get(name, ("",))[0])
    others = {key: values for key, values in request.headers.items() if key != name}
    return changed(request, headers=others if value is None else {**others, name: (value,)})


def verdict(request: ServedRequest, later: timedelta = timedelta()) -> str:
    try:
        check_signature(request, PAIR, datetime.now(UTC) + later)
    except RefusedRequestError as error:
        return error.code
    return "ok"


def test_what_botocore_signs_is_right() -> None:
    assert verdict(signed()) == "ok"
    assert verdict(signed(Range="bytes=0-9", **{"x-amz-meta-a": " a   b "})) == "ok"


def test_every_change_is_detected() -> None:
    request = signed(Range="bytes=0-9")
    assert verdict(request) == "ok"
    for other in [
        changed(request, method="HEAD"),
        changed(request, raw_path=request.raw_path + "x"),
        changed(request, raw_path=request.raw_path.replace("/a%20b", "/./a%20b")),
        changed(request, raw_query=request.raw_query.replace("c&", "d&", 1)),
        changed(request, raw_query=request.raw_query + "&other=1"),
        with_header(request, "host", lambda _: "127.0.0.1:10"),
        with_header(request, "range", lambda _: "bytes=0-99"),
        with_header(request, "x-amz-security-token", lambda _: "x"),
    ]:
        assert verdict(other) in ("SignatureDoesNotMatch", "AccessDenied"), other


def test_every_character_of_the_authorization_counts() -> None:
    request = signed()
    text = request.headers["authorization"][0]
    others = ["", "AWS4-HMAC-SHA256", "Basic eDp5", text.replace("HMAC-SHA256", "ECDSA-P256-SHA256")]
    for place, character in enumerate(text):
        other = {"a": "b", "0": "1", "=": ":"}.get(character, "0")
        others.append(text[:place] + other + text[place + 1 :])
    for other in others:
        headers = {**request.headers, "authorization": (other,)}
        assert verdict(changed(request, headers=headers)) != "ok", other


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-amz-content-sha256", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"),
        ("x-amz-content-sha256", "0" * 64),
        ("x-amz-content-sha256", None),
        ("x-amz-date", None),
        ("x-amz-date", "yesterday"),
    ],
)
def test_headers_that_a_signature_needs(name: str, value: str | None) -> None:
    assert verdict(with_header(signed(), name, lambda _: value)) != "ok"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (14 * 60, "ok"),
        (-14 * 60, "ok"),
        (16 * 60, "RequestTimeTooSkewed"),
        (-16 * 60, "RequestTimeTooSkewed"),
    ],
)
def test_times(seconds: int, expected: str) -> None:
    assert verdict(signed(), timedelta(seconds=seconds)) == expected


def test_signatures_in_urls_are_refused() -> None:
    with served(FILES, with_s3=True) as server, closing(client_of(server)) as client:
        url = urlsplit(client.generate_presigned_url("get_object", {"Bucket": "view", "Key": "2013/a.parquet"}))
        with closing(http.client.HTTPConnection(url.netloc)) as raw:
            raw.request("GET", f"{url.path}?{url.query}")
            answer = raw.getresponse()
            assert answer.status == 403 and b"not signed in its headers" in answer.read()


# --- listings ---


def reference(keys: list[str], prefix: str, delimiter: str, after: str) -> list[str]:
    """Return the expected listing, by its definition: keys and common prefixes, sorted by bytes."""
    found = set()
    for key in keys:
        if key.startswith(prefix) and key.encode() > after.encode():
            head, is_cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            found.add(prefix + head + delimiter if is_cut else key)
    return sorted((name for name in found if name != after), key=str.encode)


@pytest.mark.parametrize("seed", range(20))
def test_listings_are_as_defined(seed: int) -> None:
    chance = random.Random(seed)
    names = ["a", "a-", "a.b", "a0", "b", "ü", "x=1", "A", "z z", "a+b", "a&b"]
    keys = sorted(
        {
            "/".join(chance.choice(names) + chance.choice(["", "f"]) for _ in range(chance.randint(1, 3)))
            for _ in range(40)
        }
    )
    keys = [key for key in keys if not any(other.startswith(f"{key}/") for other in keys)]
    tree = tree_of(memory_files(dict.fromkeys(keys, b"x")))
    with ViewServer(tree, with_s3=True) as server, closing(client_of(server)) as client:
        for _ in range(8):
            some = chance.choice(keys)
            prefix = chance.choice(["", some[: chance.randint(0, len(some))], some + "/", "none", "../"])
            delimiter = chance.choice(["", "/", "/"])
            after = chance.choice(["", "", chance.choice(keys), "a/"])
            found: list[str] = []
            options: dict[str, Any] = {"Bucket": "view", "Prefix": prefix, "Delimiter": delimiter, "MaxKeys": 3}
            answer = client.list_objects_v2(**options, **({"StartAfter": after} if after else {}))
            while True:
                page = [item["Key"] for item in answer.get("Contents", [])]
                page += [item["Prefix"] for item in answer.get("CommonPrefixes", [])]
                assert answer["KeyCount"] == len(page) <= 3
                found += sorted(page, key=str.encode)
                if not answer["IsTruncated"]:
                    break
                answer = client.list_objects_v2(**options, ContinuationToken=answer["NextContinuationToken"])
            assert found == reference(keys, prefix, delimiter, after), (prefix, delimiter, after)
            # The same with version 1, which continues after a name.
            former, marker = [], after
            while True:
                answer = client.list_objects(**options, Marker=marker)
                page = [item["Key"] for item in answer.get("Contents", [])]
                page += [item["Prefix"] for item in answer.get("CommonPrefixes", [])]
                former += sorted(page, key=str.encode)
                if not answer["IsTruncated"]:
                    break
                marker = answer["NextMarker"]
                assert marker == former[-1]
            assert former == found, (prefix, delimiter, after)


@pytest.mark.parametrize(
    "query",
    [
        # As s3cmd 2.3, rclone 1.60 and the AWS command line send it.
        "delimiter=%2F",
        "delimiter=%2F&encoding-type=url&max-keys=1000&prefix=",
        "prefix=&encoding-type=url",
        "",
    ],
)
def test_the_first_version_of_listings(query: str) -> None:
    with served(FILES, with_s3=True) as server:
        for path in ("/view", "/view/"):
            status, body = sent(server, f"{path}?{query}")
            document = ElementTree.fromstring(body)
            names = {element.tag.partition("}")[2] for element in document}
            assert status == 200 and {"Name", "Prefix", "Marker", "MaxKeys", "IsTruncated"} <= names
            assert names.isdisjoint({"KeyCount", "NextContinuationToken", "StartAfter"})
            keys = [unquote(element.text) for element in document.iter() if element.tag.endswith("}Key")]
            assert keys == ([] if "delimiter" in query else sorted(FILES))


def test_no_client_takes_an_etag_for_an_md5_sum() -> None:
    with served(FILES, with_s3=True) as server, closing(client_of(server)) as client:
        (first, *_) = client.list_objects_v2(Bucket="view")["Contents"]
        found = {
            first["ETag"],
            client.list_objects(Bucket="view")["Contents"][0]["ETag"],
            client.head_object(Bucket="view", Key=first["Key"])["ETag"],
            client.get_object(Bucket="view", Key=first["Key"])["ETag"],
            ask(server, first["Key"], "HEAD")[1]["ETag"],
        }
        (etag,) = found
        # As in a multipart upload, whose hash is not the content's.
        assert re.fullmatch(r'"[0-9a-f]{40}-1"', etag)


@pytest.mark.parametrize("region", ["EU_x", "", "us east"])
def test_an_error_about_a_region_names_the_one_to_use(region: str) -> None:
    with served(FILES, with_s3=True) as server:
        status, body = sent(server, "/view", region)
        error = ElementTree.fromstring(body)
        assert (status, error.findtext("Code")) == (400, "AuthorizationHeaderMalformed")
        region = error.findtext("Region") or ""
        assert sent(server, "/view", region)[0] == 200


def sent(server: ViewServer, path: str, region: str = "us-east-1") -> tuple[int, bytes]:
    """Send a signed request as it is, and return its status and body."""
    pair = server.key_pair
    assert pair is not None
    credentials = Credentials(pair.access_key_id, pair.secret.reveal().decode())
    request = AWSRequest("GET", f"{server.endpoint}{path}")
    S3SigV4Auth(credentials, "s3", region).add_auth(request)
    try:
        with urllib.request.urlopen(urllib.request.Request(request.url, headers=dict(request.headers))) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
