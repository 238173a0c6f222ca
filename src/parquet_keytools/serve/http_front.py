"""The tree over HTTP, below a path that only those know to whom it was given."""

from __future__ import annotations

import html
from collections.abc import Callable
from urllib.parse import quote

from parquet_keytools.serve.file_answer import answer_file
from parquet_keytools.serve.requests_and_answers import ServedAnswer, ServedRequest
from parquet_keytools.serve.served_tree import ServedFile, ServedTree


def answer_http(
    tree: ServedTree, request: ServedRequest, key: str, seen_before: Callable[[ServedFile], bool]
) -> ServedAnswer:
    """Return the answer to a request: a file, or the links of a folder, whose key is empty or ends with a slash.

    Raises:
        RefusedRequestError: A condition of the request does not hold, or the file does not have the range.
        FileNotFoundError: There is no such file or folder.
        KeytoolsError: What is wrong with the file.
    """
    if key and not key.endswith("/"):
        return answer_file(tree, request, key, seen_before)
    links = []
    for entry in tree.entries(key.rstrip("/")):
        name = entry.key.rpartition("/")[2] + "/" * entry.is_folder
        links.append(f'<a href="./{quote(name)}">{html.escape(name)}</a><br>\n')
    headers = {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": "default-src 'none'"}
    return ServedAnswer(200, headers, f"<!doctype html>\n{''.join(links)}".encode())
