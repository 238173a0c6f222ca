"""Writes the vector kit into a folder: `python -m vector_kit.write_kit FOLDER`."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parquet_keytools.conformance.report import RULES
from vector_kit.breaches import breaking_vectors, more_breaking_vectors
from vector_kit.good_files import good_vectors
from vector_kit.vector import MASTER_KEYS, Vector, data_key

README = """\
# Vectors for Parquet modular encryption

Small encrypted Parquet files, made from fixed seeds: good ones for each feature, and for each rule one that
breaks exactly it. `manifest.json` lists them; each entry has

- `name`: the file, or, where `is_folder` is true, a folder that is one data set;
- `title`: what is special about it; for one that breaks a rule, the rule;
- `rule`: the rule that it breaks, or null for a good one;
- `broken`: all rules that are broken: a feature such as AES_GCM_CTR_V1 is itself a weakness;
- `is_violation`: whether a violation of the specification is among them, so that a strict reader must refuse;
- `expected`: what is to be expected of the file beside the specification: its AAD prefix, the number of parts of a
  data set, how often one key may encrypt, whether plaintext files are allowed, what a table of a configuration
  wants, which keys belong to what has no key metadata.

`data_keys` has the keys of key metadata that is a key id, in hexadecimal. `master_keys` has those of key material
of type PKMT1: a master key wraps with AES-GCM, the AAD being its identifier, and the wrapped key is base64 of
nonce, ciphertext and tag, as parquet-java's in-memory test KMS does it. `rules` has all rules: section of the
specification, severity, what must hold, and what an attacker gains where it does not.

All good files hold the same 60 rows: `id` 0 to 59; `name` is "name " and id modulo 5; `price` is id / 4, or null
where id is divisible by 7. (`no-rows` has none, `nested` and one part of `same-columns` have a list `tags` more.)

What a reader should do: read every file whose `is_violation` is false; refuse, or at least not misread, every
other one. Files whose rule is a note or a weakness are legal.
"""


def all_vectors() -> Iterator[Vector]:
    """Yield all vectors."""
    yield from good_vectors()
    yield from breaking_vectors()
    yield from more_breaking_vectors()


def data_keys() -> dict[str, bytes]:
    """Return all data keys by their ids."""
    names = [f"{kind}{suffix}" for suffix in ("", ".0", ".1", ".2") for kind in ("kf", "k1", "k2")]
    return {name: data_key(name) for name in names}


def _entry(vector: Vector) -> dict[str, Any]:
    severities = {rule.id: rule.severity.value for rule in RULES}
    return {
        "name": vector.name,
        "title": vector.title,
        "rule": vector.rule,
        "broken": sorted(vector.broken),
        "is_violation": any(severities[rule_id] == "violation" for rule_id in vector.broken),
        "is_folder": vector.is_folder,
        "features": list(vector.features),
        "expected": dict(vector.expected),
        "files": list(vector.files),
    }


def manifest() -> dict[str, Any]:
    """Return the manifest."""
    return {
        "data_keys": {name: key.hex() for name, key in data_keys().items()},
        "master_keys": {name: key.hex() for name, key in MASTER_KEYS.items()},
        "rules": [
            {
                "id": rule.id,
                "section": rule.section,
                "severity": rule.severity.value,
                "holds": rule.holds,
                "gain": rule.gain,
            }
            for rule in RULES
        ],
        "vectors": [_entry(vector) for vector in all_vectors()],
    }


def place_vector(vector: Vector, folder: Path) -> Path:
    """Write one vector below a folder; returns the path of its file or folder."""
    path = folder / vector.name
    inside = path if vector.is_folder else path.parent
    inside.mkdir(parents=True, exist_ok=True)
    for name, content in vector.contents().items():
        (inside / name).parent.mkdir(exist_ok=True)
        (inside / name).write_bytes(content)
    return path


def write_kit(folder: Path) -> None:
    """Write the kit; an existing kit is replaced."""
    for part in ("good", "broken"):
        shutil.rmtree(folder / part, ignore_errors=True)
    for vector in all_vectors():
        place_vector(vector, folder)
    text = json.dumps(manifest(), indent=1)
    (folder / "manifest.json").write_text(re.sub(r"\n {4,}", " ", text) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(README, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m vector_kit.write_kit FOLDER")
    write_kit(Path(sys.argv[1]))
    print(f"The vector kit is in {sys.argv[1]}.")
