"""Files of web servers, read by ranges: `https://host/file.parquet`. Web servers list and write nothing."""

from __future__ import annotations

import errno
import re
import urllib.error
import urllib.request
from http.client import HTTPException, HTTPMessage
from typing import IO, Any

import pyarrow as pa
from pyarrow import fs as pafs

from parquet_keytools.format.file_layout import RangedFile
from parquet_keytools.runtime.presentation import shown_url
from parquet_keytools.runtime.threads_and_forks import share_with_arrow
from parquet_keytools.storage.locations import PartialHandler

_TIMEOUT_SECONDS = 60
_CONTENT_RANGE = re.compile(r"bytes \d+-\d+/(\d+)")


def _error(number: int, text: str, url: str) -> OSError:
    """Return an error with the address in its text, because Arrow drops the name of a file."""
    return OSError(number, f"{shown_url(url)}: {text}")


class HttpHandler(PartialHandler):
    """Files of web servers, whose paths are complete addresses."""

    refusal = "files of web servers are only read"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HttpHandler)

    def __hash__(self) -> int:
        return hash(HttpHandler)

    def get_type_name(self) -> str:
        """Return its name."""
        return "http"

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        """Return the sizes of files."""
        infos = []
        for path in paths:
            try:
                infos.append(pafs.FileInfo(path, pafs.FileType.File, size=_WebFile(path).size_bytes))
            except FileNotFoundError:
                infos.append(pafs.FileInfo(path, pafs.FileType.NotFound))
        return infos

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Open a file for reading by ranges."""
        return pa.PythonFile(_WebFile(path), mode="r")

    def get_file_info_selector(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        """Refuse: a web server lists nothing."""
        raise _error(errno.ENOTSUP, "a web server lists no folders: name its files", selector.base_dir)


class _WebFile(RangedFile):
    """A file on a web server that supports ranges."""

    def __init__(self, url: str) -> None:
        super().__init__()
        share_with_arrow(self)
        self._url = url
        # Signed addresses are for GET, and not for HEAD.
        with _opened(url, 0, 0) as answer:
            found = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
            if answer.status != 206 or not found:
                raise _error(errno.ENOTSUP, "the server does not support ranges: download the file first", url)
        self.size_bytes = int(found[1])

    def read_at(self, offset: int, length: int) -> bytes:
        """Return a range."""
        if not length:
            return b""
        with _opened(self._url, offset, offset + length - 1) as answer:
            if answer.status != 206:
                raise _error(errno.EIO, "the server does not support ranges any more", self._url)
            try:
                data: bytes = answer.read(length)
            except HTTPException:
                raise _error(errno.EIO, "the server closed the connection early", self._url) from None
        return data


class _SaferRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        """Follow a redirect, unless it leads from HTTPS to HTTP."""
        if req.full_url.lower().startswith("https:") and not newurl.lower().startswith("https:"):
            raise _error(errno.EPERM, "the server redirects to an address without TLS", req.full_url)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opened(url: str, first: int, last: int) -> Any:
    # Its scheme was checked by `is_url`.
    request = urllib.request.Request(  # noqa: S310
        url, headers={"Range": f"bytes={first}-{last}", "Accept-Encoding": "identity"}
    )
    try:
        return urllib.request.build_opener(_SaferRedirects).open(request, timeout=_TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:
            raise _error(errno.EIO, "the file is empty, or became shorter", url) from None
        if error.code == 404 and any(mark in url.partition("?")[0] for mark in "*["):
            why = "the server answers with HTTP status 404; web servers do not list files: name each, not a glob"
            raise _error(errno.ENOENT, why, url) from None
        number = {401: errno.EACCES, 403: errno.EACCES, 404: errno.ENOENT, 410: errno.ENOENT}.get(error.code)
        raise _error(number or errno.EIO, f"the server answers with HTTP status {error.code}", url) from None
    except urllib.error.URLError as error:
        raise _error(errno.EIO, f"the server could not be reached: {error.reason}", url) from None
    except (HTTPException, ValueError) as error:
        # Its text may quote the address.
        raise _error(errno.EIO, f"the request failed ({type(error).__name__})", url) from None
