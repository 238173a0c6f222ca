"""Lines to paste into engines, with the address and the credentials of this run."""

from __future__ import annotations

from urllib.parse import quote

from parquet_keytools.serve.s3_front import BUCKET
from parquet_keytools.serve.s3_signature import KeyPair


def http_lines(url: str, key: str) -> dict[str, str]:
    """Return a line for each engine that reads one file over HTTP.

    Args:
        url: Of the folder that is served, with its slash.
        key: Of the file.
    """
    file = url + quote(key)
    return {
        "DuckDB": f"select * from '{file}';",  # noqa: S608
        "Polars": f'pl.scan_parquet("{file}")',
        "ClickHouse": f"select * from url('{file}', Parquet);",  # noqa: S608
    }


def s3_lines(endpoint: str, key_pair: KeyPair, *, region: str = "us-east-1") -> dict[str, str]:
    """Return lines for each engine that reads all files as S3.

    Args:
        endpoint: Scheme, host and port.
        key_pair: The credentials.
        region: Any will do.
    """
    scheme, _, host = endpoint.partition("://")
    key_id, secret = key_pair.access_key_id, key_pair.secret.reveal().decode()
    is_tls = scheme == "https"
    options = {
        "aws_endpoint_url": endpoint,
        "aws_access_key_id": key_id,
        "aws_secret_access_key": secret,
        "aws_region": region,
    } | ({} if is_tls else {"aws_allow_http": "true"})
    return {
        "DuckDB": (
            f"create secret (type s3, key_id '{key_id}', secret '{secret}', region '{region}', endpoint '{host}', "
            f"url_style 'path', use_ssl {str(is_tls).lower()}); from 's3://{BUCKET}/**/*.parquet';"
        ),
        "Polars": f'pl.scan_parquet("s3://{BUCKET}/**/*.parquet", storage_options={options!r})',
        "ClickHouse": (
            f"select * from s3('{endpoint}/{BUCKET}/**/*.parquet', '{key_id}', '{secret}', 'Parquet');"  # noqa: S608
        ),
    }
