"""What `make` installs from, and that it does nothing twice while tests run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("configured", "environment", "index"),
    [
        ("[global]\nindex-url = https://global.example\n", {}, "https://global.example"),
        (
            "[global]\nindex-url = https://global.example\n[install]\nindex-url = https://install.example\n",
            {},
            "https://install.example",
        ),
        (
            "[install]\nindex-url = https://install.example\n",
            {"PIP_INDEX_URL": "https://environment.example"},
            "https://environment.example",
        ),
    ],
)
def test_uv_gets_the_index_that_pip_would_take(
    tmp_path: Path, configured: str, environment: dict[str, str], index: str
) -> None:
    (tmp_path / "pip.conf").write_text(configured)
    (tmp_path / "show.mk").write_text('index:\n\t@echo "$(PIP_INDEX)"\n')
    # The make that runs these tests hands its own options down.
    others = ("PIP_INDEX_URL", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES")
    inherited = {name: value for name, value in os.environ.items() if name not in others}
    done = subprocess.run(
        ["make", "-f", "Makefile", "-f", tmp_path / "show.mk", f"BIN={Path(sys.executable).parent}", "index"],
        cwd=ROOT,
        env=inherited | environment | {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.stderr) == (f"{index}\n", "")


def test_what_runs_beside_the_tests_installs_nothing() -> None:
    recipes = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("test", "check"):
        recipe = recipes.partition(f"\n{target}: ")[2].partition("\n\n")[0]
        assert "$(CHECKS)" in recipe and "$(MAKE)" not in recipe
