"""What `make` installs, and from where; that it does nothing twice while tests run; and its last line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def make(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # The make that runs these tests passes on its own options.
    others = ("PIP_INDEX_URL", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES", "VERSIONS")
    inherited = {name: value for name, value in os.environ.items() if name not in others}
    command = ["make", "-f", "Makefile", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=inherited | environment, capture_output=True, text=True, timeout=120
    )


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
    binaries = f"BIN={Path(sys.executable).parent}"
    environment = environment | {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf")}
    done = make("-f", str(tmp_path / "show.mk"), binaries, "index", **environment)
    assert (done.stdout, done.stderr) == (f"{index}\n", "")


def test_what_runs_beside_the_tests_installs_nothing() -> None:
    recipes = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("test", "check"):
        recipe = recipes.partition(f"\n{target}: ")[2].partition("\n\n")[0]
        assert "$(CHECKS)" in recipe and "$(MAKE)" not in recipe


def commands(*arguments: str) -> str:
    """Return what make would run in a clone without any installation."""
    done = make("--dry-run", "--always-make", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.replace("\\\n", " ")


@pytest.mark.parametrize(
    ("target", "lock"), [("test", "dev"), ("check", "dev"), ("docs", "dev"), ("demo", "demo")]
)
def test_the_lock_is_installed_with_hashes(target: str, lock: str) -> None:
    text = commands(target, "VENV=nowhere")
    for installer in ("uv pip install", "python -m pip install"):
        assert re.search(rf"{installer} .*--require-hashes -r requirements-{lock}.txt", text), installer
    # Nothing else is resolved: not for the package, not for its build, and uv itself is in the lock.
    installs = [line for line in re.split(r"&&|\|\||[|;{}]|\n", text) if re.search(r"\bpip install\b", line)]
    assert installs
    assert [line for line in installs if "--require-hashes" not in line and "--no-deps" not in line] == []


def test_other_versions_have_an_environment_of_their_own() -> None:
    lowest, newest = commands("test", "VERSIONS=lowest"), commands("test", "VERSIONS=newest")
    assert "--resolution lowest-direct" in lowest and "pytest --core" in lowest
    assert "--upgrade" in newest and "pytest --core" not in newest
    for name, text in (("lowest", lowest), ("newest", newest)):
        assert f".venv-{name}/bin/python -m pytest" in text
        assert ".venv/" not in text and "--require-hashes -r requirements-" not in text


def test_a_mistyped_choice_of_versions_is_an_error() -> None:
    done = make("test", "VERSIONS=latest")
    assert done.returncode == 2 and "locked, newest or lowest" in done.stderr


def test_the_last_line_says_what_was_skipped(tmp_path: Path) -> None:
    line = tmp_path / "line.txt"
    file = "tests/unit/keys/test_material_store.py"
    tests = [f"{file}::{name}" for name in ("test_reads_what_parquet_java_wrote", "test_missing")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", f"--skipped-to={line}", *tests],
        cwd=ROOT,
        env=os.environ | {"PARQUET_TEST_DATA": "/nowhere"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and " passed" in done.stdout
    expected = "1 test was skipped. 1: there are no Parquet test files in /nowhere; set PARQUET_TEST_DATA\n"
    assert line.read_text() == expected
    for versions in ("locked", "lowest"):
        last = commands("test", f"VERSIONS={versions}").rstrip().splitlines()[-1]
        assert re.search(r"cat (\S+ )?\S+/skipped\.txt; exit \$STATUS$", last)
