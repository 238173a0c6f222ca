"""A request as it came, what is answered to it, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from urllib.parse import unquote_to_bytes

from parquet_keytools.serve.served_tree import FileReader


class RefusedRequestError(Exception):
    """A request is not answered with what it asks for.

    Attributes:
        status: The status of HTTP.
        code: What S3 calls it.
        headers: Of the answer.
    """

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})


@dataclass(frozen=True)
class ServedRequest:
    """A request.

    Attributes:
        method: GET or HEAD.
        raw_path: As it was sent, with its percent signs, and without the query.
        raw_query: What follows the question mark.
        headers: Name in lower case -> its values, in their order.
    """

    method: str
    raw_path: str
    raw_query: str
    headers: Mapping[str, tuple[str, ...]]

    def header(self, name: str) -> str | None:
        """Return a header that can be there once.

        Raises:
            RefusedRequestError: It is there twice: who is before us may have read the other one.
        """
        values = self.headers.get(name, ())
        if len(values) > 1:
            raise RefusedRequestError(400, "InvalidRequest", f"The header {name} is there {len(values)} times.")
        return values[0].strip() if values else None

    @property
    def path(self) -> str:
        """The path, decoded once; what is not UTF-8 is refused."""
        return decoded(self.raw_path)

    @property
    def query(self) -> list[tuple[str, str]]:
        """Names and values of the query, decoded, in their order."""
        pairs = (part.partition("=") for part in self.raw_query.split("&") if part)
        return [(decoded(name), decoded(value)) for name, _, value in pairs]


@dataclass(frozen=True)
class ServedRange:
    """Bytes of a file that are an answer.

    Attributes:
        opened: Gives the reader, for as long as the answer is sent.
        key: Of the file.
        start: The first byte.
        length: How many.
    """

    opened: AbstractContextManager[FileReader]
    key: str
    start: int
    length: int


@dataclass(frozen=True)
class ServedAnswer:
    """An answer.

    Attributes:
        status: The status of HTTP.
        headers: Without those that every answer has, and without Content-Length where a body is given.
        body: All bytes of it, or those of a file; with HEAD they are counted and not sent.
    """

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | ServedRange = b""


def decoded(text: str) -> str:
    """Return text of an URL, decoded once.

    Raises:
        RefusedRequestError: It is not UTF-8.
    """
    try:
        return unquote_to_bytes(text).decode("utf-8")
    except UnicodeDecodeError:
        raise RefusedRequestError(400, "InvalidURI", "The URL is not UTF-8.") from None
