"""The HTTP session of a process, for a KMS with a REST API: one attempt, a deadline, no redirects."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import requests
from requests.adapters import HTTPAdapter
from urllib3 import Timeout
from urllib3.exceptions import HTTPError, LocationValueError, ReadTimeoutError

from parquet_keytools.errors import KmsResponseInvalidError
from parquet_keytools.kms.transport import retry_after_seconds

MAX_ANSWER_BYTES = 16 * 1024 * 1024

REDIRECTS = (301, 302, 303, 307, 308)


class Answer(NamedTuple):
    """Status, headers and body of an answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The JSON in the body, or None if it is none."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None

    @property
    def retry_after_seconds(self) -> float:
        """How long the server asks the client to wait."""
        return retry_after_seconds(self.headers.get("Retry-After"))


class HttpSession(requests.Session):
    """A session for requests to one server, from any number of threads, which retries nothing."""

    def __init__(self, connections: int) -> None:
        super().__init__()
        adapter = HTTPAdapter(pool_connections=8, pool_maxsize=connections, max_retries=0, pool_block=False)
        self.mount("https://", adapter)
        self.mount("http://", adapter)

    def get_redirect_target(self, response: requests.Response) -> None:  # type: ignore[override, unused-ignore]
        """Report no redirects: requests would parse their target, and read their whole content."""


def send(
    session: requests.Session, method: str, url: str, deadline: float, clock: Callable[[], float], **options: Any
) -> Answer:
    """Send a request once, and follow no redirect: token and keys would follow it.

    The deadline, on the clock, is for the whole answer. An answer that is too long raises
    `KmsResponseInvalidError`, a connection that fails `OSError`.
    """
    left = deadline - clock()
    if left <= 0:
        raise TimeoutError
    timeout: Any = Timeout(total=left)
    try:
        with session.request(
            method, url, allow_redirects=False, stream=True, timeout=timeout, **options
        ) as response:
            body = bytearray()
            while part := response.raw.read1(65_536, decode_content=True):
                body += part
                if len(body) > MAX_ANSWER_BYTES:
                    raise KmsResponseInvalidError("it is too long")
                # The timeout of the request limits silence only: a server that drips bytes never exceeds it.
                if clock() >= deadline:
                    raise TimeoutError
            return Answer(response.status_code, response.headers, bytes(body))
    except (requests.Timeout, ReadTimeoutError):
        raise TimeoutError from None
    except LocationValueError:
        raise  # The host in a setting is not valid: to wait for it does not help.
    except HTTPError as error:
        raise requests.ConnectionError(type(error).__name__) from None
