"""requirements-dev.txt fits pyproject.toml, and works with any package index."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ENTRY = re.compile(
    r"^([a-z0-9._-]+)==([^\s;]+)(?: ; [^\\\n]+)? \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", re.MULTILINE
)


def wanted(texts: list[str]) -> Iterator[Requirement]:
    """Yield requirements, with those of our own extras that they name."""
    for text in texts:
        requirement = Requirement(text)
        if canonicalize_name(requirement.name) != PROJECT["name"]:
            yield requirement
            continue
        for extra in requirement.extras:
            yield from wanted(PROJECT["optional-dependencies"][extra])


def test_it_has_nothing_but_versions_and_hashes() -> None:
    rest = ENTRY.sub("", LOCK)
    assert [line for line in rest.splitlines() if not line.startswith("#")] == []
    assert re.findall(r"://|@|--index|--find-links|--trusted|file:", LOCK) == []


def test_it_has_what_the_project_asks_for() -> None:
    locked: dict[str, list[str]] = {}
    for name, version in ENTRY.findall(LOCK):
        locked.setdefault(name, []).append(version)
    extras = PROJECT["optional-dependencies"]
    missing = [
        str(requirement)
        for requirement in wanted([*PROJECT["dependencies"], *extras["test"], *extras["docs"]])
        if not any(requirement.specifier.contains(version) for version in locked.get(requirement.name.lower(), []))
    ]
    assert missing == [], "run: make lock"
