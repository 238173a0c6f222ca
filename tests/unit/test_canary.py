"""A whole run with known keys, and then a search for them in all of its output."""

from __future__ import annotations

import base64
import contextlib
import gc
import itertools
import logging
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from faults import FAILURES, RESPONSE_SECRET, FaultyKms
from soak import SOAK

from parquet_keytools import Keytools, SecretBytes, parse_configuration
from parquet_keytools.errors import KeytoolsError

TOKEN = "s.CANARY-token-of-the-kms"
MASTER_KEYS = {name: os.urandom(16) for name in ("kf", "ka", "kb")}
DATA_KEYS = {name: os.urandom(16) for name in ("df", "da")}
TABLE = pa.table({"plain": range(200), "a": range(200), "b": [f"text {i}" for i in range(200)]})


class Run:
    """Collects all output, and the keys that must not be in it."""

    def __init__(self) -> None:
        self.secrets: set[bytes] = {*MASTER_KEYS.values(), *DATA_KEYS.values()}
        self.texts: list[tuple[str, bytes]] = []
        self.errors = 0

    def out(self, what: str, content: str | bytes) -> None:
        self.texts.append((what, content.encode("utf-8", "replace") if isinstance(content, str) else content))

    def attempt(self, what: str, work: Callable[[], object]) -> None:
        try:
            self.out(what, repr(work())[:10_000])
        except Exception as error:
            self.errors += 1
            # With the variables of all frames, as error trackers report them.
            printed = "".join(
                traceback.TracebackException.from_exception(error, capture_locals=True).format()
                if isinstance(error, KeytoolsError)
                else traceback.format_exception(error)
            )
            self.out(f"{what}: traceback", printed)
            self.out(f"{what}: error", f"{error} {error!r} {vars(error)!r}")
            with contextlib.suppress(TypeError, AttributeError, pickle.PicklingError):
                self.out(f"{what}: pickle", pickle.dumps(error))

    def leaks(self) -> list[str]:
        """Return where a secret appears, in plain, hex or base64, at any alignment."""
        found = []
        for secret in (*self.secrets, TOKEN.encode(), RESPONSE_SECRET.encode()):
            spellings = [secret, secret.hex().encode(), secret.hex().upper().encode(), repr(secret)[2:-1].encode()]
            for shift in range(3):
                encoded = base64.b64encode(bytes(shift) + secret)
                spellings.append(encoded[4 if shift else 0 : -4])
                spellings.append(encoded[4 if shift else 0 : -4].replace(b"+", b"-").replace(b"/", b"_"))
            for what, content in self.texts:
                if any(spelling in content for spelling in spellings):
                    found.append(what)
        return found


class TokenKms(FaultyKms):
    """Has a token, as a client of a server would, and its foreign exceptions repeat it."""

    def __init__(self) -> None:
        super().__init__(MASTER_KEYS)
        self._token = TOKEN

    def _next_failure(self, master_key_id: str) -> str | None:
        try:
            return super()._next_failure(master_key_id)
        except (RuntimeError, TimeoutError) as error:
            raise type(error)(f"{error} X-Vault-Token: {self._token}") from error


def keytools(kms: FaultyKms, **settings: Any) -> Keytools:
    table = {
        "footer_key": "kf",
        "column_keys": {"ka": ["a"], "kb": ["b"]},
        "unlisted_columns": "plaintext",
    } | settings
    document = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": list(MASTER_KEYS)},
        "data_keys": {name: base64.b64encode(key).decode() for name, key in DATA_KEYS.items()},
        "tables": {
            "t": table,
            "d": {"footer_key": "df", "column_keys": {"da": ["a"]}, "unlisted_columns": "plaintext"},
        },
    }
    return Keytools(parse_configuration(document), kms=kms)


def drive(run: Run, folder: Path, settings: dict[str, Any]) -> None:
    """Do everything once successfully, and once with each failure."""
    kms = TokenKms()
    tools = keytools(kms, **settings)
    folder.mkdir()
    path, many = folder / "x.parquet", folder / "many"
    options: dict[str, Any] = {"table_name": "t"}
    prefix = settings.get("aad_prefix")
    for failure in (None, *FAILURES):
        tools.clear_caches()
        kms.fail(failure or "", "kb")
        kms.failure = failure
        name = f"{settings} {failure}"
        run.attempt(f"{name} write_table", lambda: tools.write_table(TABLE, path, **options))
        run.attempt(
            f"{name} write_dataset",
            lambda: tools.write_dataset(TABLE, many, existing_data_behavior="overwrite_or_ignore", **options),
        )
        run.attempt(
            f"{name} encryption_properties",
            lambda: pq.write_table(
                TABLE,
                folder / "y.parquet",
                encryption_properties=tools.encryption_properties("t", TABLE.schema, folder / "y.parquet"),
            ),
        )
        run.attempt(f"{name} read_table", lambda: tools.read_table(path, aad_prefix=prefix))
        run.attempt(
            f"{name} filter",
            lambda: tools.read_table(path, columns=["plain"], filters=pc.field("b") == "x", aad_prefix=prefix),
        )
        run.attempt(f"{name} dataset", lambda: tools.dataset(many, aad_prefix=prefix).to_table())
        run.attempt(f"{name} properties", lambda: repr(tools.decryption_properties(path)))
        run.attempt(
            f"{name} plain", lambda: pq.read_table(path, decryption_properties=tools.decryption_properties(path))
        )
        run.out(f"{name} repr", f"{tools!r} {tools.configuration!r} {kms!r} {tools.__dict__!r}")
    data_keys = folder / "data keys.parquet"
    kms.failure = None
    run.attempt("data keys", lambda: tools.write_table(TABLE, data_keys, table_name="d"))
    run.attempt("data keys", lambda: tools.read_table(data_keys))
    damage(run, tools, path)
    run.attempt("missing", lambda: tools.read_table(folder / "no.parquet"))
    run.attempt("closed", tools.close)
    run.secrets |= set(kms.keys_seen)


def damage(run: Run, tools: Keytools, path: Path) -> None:
    data = path.read_bytes()
    for place in itertools.chain(range(0, len(data), 97 if SOAK else 291), range(len(data) - 40, len(data))):
        damaged = bytearray(data)
        damaged[place] ^= 4
        path.write_bytes(damaged)
        run.attempt(f"damaged at {place}", lambda: tools.read_table(path).num_rows)
    path.write_bytes(data)


@pytest.fixture
def made_keys(monkeypatch: pytest.MonkeyPatch) -> set[bytes]:
    """Collect every key that is made in this process: KEKs and DEKs."""
    made: set[bytes] = set()
    random = SecretBytes.random

    def recorded(length_bits: int) -> SecretBytes:
        key = random(length_bits)
        made.add(key.reveal())
        return key

    monkeypatch.setattr(SecretBytes, "random", recorded)
    return made


VARIANTS: list[dict[str, Any]] = [
    {},
    {"key_material": "external"},
    {"aad_prefix": "canary", "key_material": "external", "data_key_length_bits": 256},
    {"plaintext_footer": True, "aad_prefix": "canary", "double_wrapping": False},
]
if SOAK:
    VARIANTS += [{"double_wrapping": False}, {"aad_prefix": "canary"}]


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_no_secret_comes_out(
    tmp_path: Path,
    settings: dict[str, Any],
    made_keys: set[bytes],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    run = Run()
    caplog.set_level(logging.DEBUG)
    drive(run, tmp_path / "data", settings)
    gc.collect()
    run.secrets |= made_keys
    run.out("log", caplog.text)
    printed = capfd.readouterr()
    run.out("standard output", printed.out)
    run.out("standard error", printed.err)
    for file in tmp_path.rglob("*"):
        if file.is_file():
            run.out(f"file {file.name}", file.read_bytes())
    assert run.errors > 20, "the run had too few errors to show anything"
    assert len(run.secrets) > 8, "the keys were not seen"
    assert "encrypted by" in caplog.text
    assert run.leaks() == []
    assert not list(temporary.iterdir())
    assert not [file.name for file in tmp_path.rglob("*") if file.name.endswith(".tmp")]


def test_the_search_finds_secrets() -> None:
    """A search that never finds anything proves nothing."""
    key = os.urandom(16)
    for content in (
        b"x" + key,
        key.hex(),
        repr({"key": key}),
        base64.b64encode(key),
        base64.b64encode(b"ab" + key + b"cd"),
        base64.urlsafe_b64encode(b"a" + key),
        TOKEN,
    ):
        run = Run()
        run.secrets.add(key)
        run.out("somewhere", content)
        assert run.leaks() == ["somewhere"], content
