"""SoftHSM for tests: a software HSM with its tokens in a folder."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pkcs11
import pytest

MODULE = Path("/usr/lib/softhsm/libsofthsm2.so")
PIN = "pin-4321-not-to-be-shown"

needs_softhsm = pytest.mark.skipif(
    not MODULE.exists() or shutil.which("softhsm2-util") is None, reason="Debian's softhsm2 is not installed"
)


class SoftHsm:
    """Tokens in a folder, and copies of the library: the system loads each copy as a separate library.

    So each test has an uninitialized library, and an operator that shares no state with the client.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens = folder / "tokens"
        self.tokens.mkdir()
        configuration = folder / "softhsm2.conf"
        configuration.write_text(f"directories.tokendir = {self.tokens}\nobjectstore.backend = file\n")
        # The library reads it when it is initialized.
        monkeypatch.setenv("SOFTHSM2_CONF", str(configuration))
        self.module = Path(shutil.copy(MODULE, folder / "client.so"))
        self._operator = Path(shutil.copy(MODULE, folder / "operator.so"))
        self.folder_of_token = self.add_token("keys")

    def add_token(self, label: str) -> Path:
        """Initialize a token. Returns its folder."""
        before = set(self.tokens.iterdir())
        command = [
            "softhsm2-util",
            "--init-token",
            "--free",
            "--label",
            label,
            "--so-pin",
            "12345678",
            "--pin",
            PIN,
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=30)
        (added,) = set(self.tokens.iterdir()) - before
        return added

    def settings(self, **settings: Any) -> dict[str, Any]:
        """Return the settings of a client."""
        return {"type": "pkcs11", "module": str(self.module), "token_label": "keys", "pin": PIN} | settings

    def token(self) -> pkcs11.Token:
        """Return the token as the operator sees it now."""
        return pkcs11.lib(str(self._operator)).get_token(token_label="keys")

    @contextmanager
    def operator(self) -> Iterator[pkcs11.Session]:
        """Log in as the operator."""
        with self.token().open(rw=True, user_pin=PIN) as session:
            yield session

    def destroy(self, label: str, number: bytes | None = None) -> None:
        """Destroy a key."""
        with self.operator() as session:
            wanted = {pkcs11.Attribute.LABEL: label} | ({} if number is None else {pkcs11.Attribute.ID: number})
            for found in session.get_objects(wanted):
                found.destroy()
