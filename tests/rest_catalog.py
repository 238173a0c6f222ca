"""A catalog that speaks Iceberg's REST protocol, as far as tests need it; it keeps each field it receives."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class RestServer:
    """A catalog in memory; metadata files are in a folder.

    Attributes:
        folder: Where the tables are.
        tables: Namespace and name -> location of the metadata file.
        requests: The commits.
        drops_keys: Whether it ignores the encryption fields of a request, as an older server may.
        failing: HTTP status of the next commits: they are done, and the answer is lost.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tables: dict[str, Path] = {}
        self.requests: list[dict[str, Any]] = []
        self.drops_keys = False
        self.failing: list[int] = []
        self.lock = threading.Lock()

    def write(self, name: str, document: dict[str, Any], number: int) -> None:
        path = self.folder / name / "metadata" / f"{number:05d}-{uuid.uuid4()}.metadata.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document))
        self.tables[name] = path

    def loaded(self, name: str) -> dict[str, Any]:
        path = self.tables[name]
        return {"metadata-location": f"file://{path}", "metadata": json.loads(path.read_text()), "config": {}}

    def create(self, request: dict[str, Any]) -> dict[str, Any]:
        properties = dict(request["properties"])
        schema = {**request["schema"], "schema-id": 0}
        document = {
            "format-version": int(properties.pop("format-version")),
            "table-uuid": str(uuid.uuid4()),
            "location": f"file://{self.folder}/{request['name']}",
            "last-sequence-number": 0,
            "last-updated-ms": int(time.time() * 1000),
            "last-column-id": max(field["id"] for field in schema["fields"]),
            "current-schema-id": 0,
            "schemas": [schema],
            "default-spec-id": 0,
            "partition-specs": [{"spec-id": 0, "fields": []}],
            "last-partition-id": 999,
            "default-sort-order-id": 0,
            "sort-orders": [{"order-id": 0, "fields": []}],
            "properties": properties,
            "next-row-id": 0,
            "refs": {},
            "snapshots": [],
        }
        self.write(request["name"], document, 0)
        return self.loaded(request["name"])

    def commit(self, name: str, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.requests.append(request)
        document = json.loads(self.tables[name].read_text())
        for requirement in request["requirements"]:
            if requirement["type"] == "assert-ref-snapshot-id":
                current = document["refs"].get(requirement["ref"], {}).get("snapshot-id")
                if current != requirement["snapshot-id"]:
                    error = {"message": "main has moved", "type": "CommitFailedException", "code": 409}
                    return 409, {"error": error}
        for update in request["updates"]:
            self.apply(document, update)
        self.write(name, document, int(self.tables[name].name[:5]) + 1)
        return 200, self.loaded(name)

    def apply(self, document: dict[str, Any], update: dict[str, Any]) -> None:
        action = update["action"]
        keys = document.setdefault("encryption-keys", [])
        if action == "add-encryption-key":
            known = {key["key-id"] for key in keys}
            if not self.drops_keys and update["encryption-key"]["key-id"] not in known:
                keys.append(update["encryption-key"])
        elif action == "remove-encryption-key":
            document["encryption-keys"] = [key for key in keys if key["key-id"] != update["key-id"]]
        elif action == "add-snapshot":
            snapshot = dict(update["snapshot"])
            if self.drops_keys:
                snapshot.pop("key-id", None)
            document["snapshots"].append(snapshot)
            document["last-sequence-number"] = snapshot["sequence-number"]
            document["next-row-id"] += snapshot["added-rows"]
        elif action == "set-snapshot-ref":
            document["refs"][update["ref-name"]] = {"snapshot-id": update["snapshot-id"], "type": update["type"]}
            document["current-snapshot-id"] = update["snapshot-id"]
        elif action == "set-properties":
            document["properties"] |= update["updates"]
        else:
            raise AssertionError(action)


@contextlib.contextmanager
def rest_server(folder: Path) -> Iterator[tuple[RestServer, str]]:
    """Start a server on a free port; yields it and its address."""
    server = RestServer(folder)

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            name = self.path.split("?")[0].rsplit("/", 1)[-1]
            if name == "config":
                self.answer(200, {"defaults": {}, "overrides": {}})
            elif name in server.tables:
                self.answer(200, server.loaded(name))
            else:
                self.answer(404, {"error": {"message": "none", "type": "NoSuchTableException", "code": 404}})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                if "updates" not in request:
                    self.answer(200, server.create(request))
                    return
                status, body = server.commit(self.path.rsplit("/", 1)[-1], request)
                if status == 200 and server.failing:
                    status = server.failing.pop()
                    body = {"error": {"message": "lost", "type": "InternalServerError", "code": status}}
            self.answer(status, body)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
