"""No public name is removed or renamed unnoticed; each public module has its page in the reference."""

from __future__ import annotations

import importlib
import re
from functools import reduce
from pathlib import Path

import pytest
from public_api import MODULES, RECORD, missing, public_api, recorded_api

import parquet_keytools

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
DIRECTIVES = sorted(
    (page.name, target)
    for page in REFERENCE.glob("*.md")
    for target in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.M)
)


def test_no_public_name_is_gone() -> None:
    gone = missing(recorded_api(), public_api(inherited=True))
    assert gone == [], f"these names need a deprecation first (CONTRIBUTING.md), or a new {RECORD.name}"


def test_the_record_has_what_the_package_itself_offers() -> None:
    recorded = recorded_api()
    assert {f"parquet_keytools.{name}" for name in parquet_keytools.__all__} <= set(recorded)
    assert [line for line in recorded if line.startswith("parquet_keytools.keytools.Keytools.write_table(")]
    assert [line for line in recorded if line.startswith("parquet_keytools.kms.client.KmsClient._wrap_many(")]
    assert "Keytools.write_table() -> engine" in recorded
    assert len(recorded) == len(set(recorded)) >= 400


@pytest.mark.parametrize(
    ("recorded", "present", "gone"),
    [
        ("m.f(a, b)", "m.f(a, b)", None),
        ("m.f(a)", "m.f(a, b)", None),
        ("m.f(a, b)", "m.f(a, c)", "m.f(a, b), which is now m.f(a, c)"),
        ("m.f(a, *b)", "m.f(a)", "m.f(a, *b), which is now m.f(a)"),
        ("m.f()", "m.f", "m.f(), which is now m.f"),
        ("m.f(a)", "m.g(a)", "m.f(a)"),
        ("m.C.x", "m.C", "m.C.x"),
        ("Keytools.f() -> x", "Keytools.f() -> y", "Keytools.f() -> x"),
    ],
)
def test_what_is_gone_is_found(recorded: str, present: str, gone: str | None) -> None:
    assert missing([recorded], [present]) == ([] if gone is None else [gone])


@pytest.mark.parametrize(("page", "target"), DIRECTIVES)
def test_the_reference_names_what_there_is(page: str, target: str) -> None:
    """`make docs` detects the same; this test does not need it."""
    parts = target.split(".")
    for length in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        assert reduce(getattr, parts[length:], module) is not None
        return
    pytest.fail(f"docs/reference/{page}: there is no {target}")


def test_every_public_module_is_in_the_reference() -> None:
    shown = {target for _, target in DIRECTIVES}
    without_page = {name for name in MODULES if not any(f"{target}.".startswith(f"{name}.") for target in shown)}
    # Authors of plug-ins need only the name of an entry point group from this one: CONTRIBUTING.md has it.
    assert without_page == {"parquet_keytools.kms.registry"}
