"""The certificate of an erasure, as JSON and text; `docs/erase.md` describes the JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from parquet_keytools.erasure.plan import ErasedKey, Plan
from parquet_keytools.kms.client import CallerIdentity
from parquet_keytools.runtime.presentation import printable

FORMAT = "parquet-keytools erasure certificate"
VERSION = 1
_MOST_SHOWN = 10


@dataclass(frozen=True)
class Proof:
    """Whether a new client of the KMS could unwrap keys of the erased columns.

    Attributes:
        obtained: Whether the KMS refused each of them because the master key is gone.
        at: When, as ISO 8601 in UTC.
        wrapped_keys: How many distinct wrapped keys were tried.
        outcomes: Class of the error, or `unwrapped` -> number of wrapped keys.
        reason: Why it was not obtained; empty if it was.
        unreachable: Whether the KMS could not be reached.
    """

    obtained: bool
    at: str
    wrapped_keys: int
    outcomes: Mapping[str, int]
    reason: str = ""
    unreachable: bool = False


@dataclass(frozen=True)
class Certificate:
    """What was erased, how, when and by whom, and what it does not reach.

    Attributes:
        plan: What was erased, with the master keys after their deletion.
        requested_at: Identifier of a master key -> when this run requested its deletion. A master key that was
            deleted before is missing.
        backends: Identifier of a master key -> name of the KMS client.
        caller: Who ran it.
        proof: See `Proof`.
        started_at: When the run began, as ISO 8601 in UTC.
        finished_at: When it ended.
    """

    plan: Plan
    requested_at: Mapping[str, str]
    backends: Mapping[str, str]
    caller: CallerIdentity
    proof: Proof
    started_at: str
    finished_at: str

    def to_dict(self) -> dict[str, Any]:
        """Return it as a JSON document."""
        document = self.plan.to_dict()
        del document["problems"]
        for entry in document["keys"]:
            key = entry["master_key_id"]
            entry |= {"kms": self.backends[key], "requested_at": self.requested_at.get(key)}
        document |= {
            "format": FORMAT,
            "version": VERSION,
            "started_at": self.started_at,
            "finished_at": self.finished_at,
            "run_by": self.caller._asdict(),
            "proof": {name: value for name, value in asdict(self.proof).items() if name != "unreachable"},
        }
        # As a JSON reader has it, with lists for tuples.
        read: dict[str, Any] = json.loads(canonical(document))
        return read | {"sha256": hashlib.sha256(canonical(read)).hexdigest()}

    def lines(self) -> Iterator[str]:
        """Yield it as text."""
        plan = self.plan
        yield f"Certificate of erasure: {plan.placeholder}={plan.value} in table {plan.table}"
        yield f"Examined: {', '.join(map(printable, plan.paths))}"
        yield f"Run from {self.started_at} to {self.finished_at}"
        yield f"Run by {printable(self.caller.name)}, according to {self.caller.source}"
        for key in plan.keys:
            yield f"Master key {key.deletion.key} in {self.backends[key.master_key_id]}: {state_text(key)}"
            when = self.requested_at.get(key.master_key_id)
            yield f"  its deletion was requested at {when}" if when else "  it was gone before this run"
        columns = sorted({column.column for file in plan.files for column in file.columns})
        yield f"Erased columns: {_some(columns)}"
        yield f"  files and older versions with them: {len(plan.files):,}"
        proof = self.proof
        counts = ", ".join(f"{name}: {number:,}" for name, number in proof.outcomes.items())
        if proof.obtained:
            yield f"Proof: at {proof.at}, the KMS refused each wrapped key that was tried ({counts})"
        else:
            yield f"Proof NOT obtained: {proof.reason}"
        yield "Not reached by this erasure:"
        for note in plan.not_reached:
            yield f"  - {note.text}" + (f": {_some(note.examples)}" if note.examples else "")


def canonical(document: Mapping[str, Any]) -> bytes:
    """Return the bytes of which `sha256` is the hash."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode("ascii")


def state_text(key: ErasedKey) -> str:
    """Return the state of a master key as text."""
    found = key.deletion
    if found.state == "scheduled":
        when = f" on {found.deletes_at:%Y-%m-%d %H:%M} UTC" if found.deletes_at else ""
        return f"it unwraps nothing, and the KMS deletes it{when}; until then the deletion can be cancelled"
    texts = {"deleted": "the KMS has no such key; this cannot be cancelled", "disabled": "disabled, not deleted"}
    return texts.get(found.state, "usable")


def _some(names: Any) -> str:
    shown = [printable(name) for name in names[:_MOST_SHOWN]]
    return ", ".join([*shown, f"and {len(names) - len(shown):,} more"] if len(names) > len(shown) else shown)
