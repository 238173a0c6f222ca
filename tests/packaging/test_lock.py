"""The locks fit pyproject.toml and each other, and work with any package index."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = {name: (ROOT / f"requirements-{name}.txt").read_text(encoding="utf-8") for name in ("dev", "demo")}
EXTRAS = {"dev": ("test", "docs"), "demo": ("demo",)}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ENTRY = re.compile(
    r"^([a-z0-9._-]+)==([^\s;]+)(?: ; [^\\\n]+)? \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", re.MULTILINE
)


def wanted(texts: list[str]) -> Iterator[Requirement]:
    """Yield requirements, with the requirements of our own extras that they name."""
    for text in texts:
        requirement = Requirement(text)
        if canonicalize_name(requirement.name) != PROJECT["name"]:
            yield requirement
            continue
        for extra in requirement.extras:
            yield from wanted(PROJECT["optional-dependencies"][extra])


def versions(lock: str) -> dict[str, set[str]]:
    """Return name -> versions, since there may be one for each Python."""
    found: dict[str, set[str]] = {}
    for name, version in ENTRY.findall(LOCKS[lock]):
        found.setdefault(name, set()).add(version)
    return found


@pytest.mark.parametrize("lock", LOCKS)
def test_it_has_nothing_but_versions_and_hashes(lock: str) -> None:
    rest = ENTRY.sub("", LOCKS[lock])
    assert [line for line in rest.splitlines() if not line.startswith("#")] == []
    assert re.findall(r"://|@|--index|--find-links|--trusted|file:", LOCKS[lock]) == []


@pytest.mark.parametrize("lock", LOCKS)
def test_it_has_what_the_project_asks_for(lock: str) -> None:
    locked = versions(lock)
    extras = PROJECT["optional-dependencies"]
    # The build tools of the editable installation are there, too, and its installer.
    asked = [*PROJECT["dependencies"], *(text for extra in EXTRAS[lock] for text in extras[extra])]
    missing = [
        str(requirement)
        for requirement in wanted([*asked, "editables", "hatchling", "uv"])
        if not any(requirement.specifier.contains(version) for version in locked.get(requirement.name.lower(), []))
    ]
    assert missing == [], "run: make lock"


def test_the_demo_has_the_versions_that_are_tested() -> None:
    tested = versions("dev")
    assert {name: found for name, found in versions("demo").items() if not found <= tested[name]} == {}


def test_users_may_have_any_newer_version() -> None:
    """PyIceberg is the exception: its protected classes are overridden. Tools of the tests may be pinned."""
    extras = {
        name: texts for name, texts in PROJECT["optional-dependencies"].items() if name not in ("test", "docs")
    }
    texts = [*PROJECT["dependencies"], *(text for texts in extras.values() for text in texts)]
    bounded = {
        requirement.name
        for requirement in wanted(texts)
        if {specifier.operator for specifier in requirement.specifier} - {">="}
    }
    assert bounded == {"pyiceberg"}
