"""Runs the blocks of a page of docs/recipes in order, in one folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[1] / "docs" / "recipes"
FOR_PEOPLE = {"console", "json", "properties", "hcl", "r", "sql", "text"}
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"(?:#|//|--) (\S+\.\w+)\n")


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the language and the text of each block of a page."""
    return _BLOCK.findall((RECIPES / f"{page}.md").read_text(encoding="utf-8"))


def run_blocks(
    page: str,
    folder: Path,
    *,
    python: Path = Path(sys.executable),
    programs: Path = Path(sys.executable).parent,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Write the blocks that begin with a file name, and run all others that are not for people only.

    Args:
        page: The page, without `.md`.
        folder: Where the blocks run.
        python: The interpreter for blocks of Python.
        programs: The folder with `parquet-keytools`.
        variables: Environment variables.
    """
    path = f"{programs}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, **(variables or {})}
    commands: dict[str, list[str | Path]] = {"python": [python, "-c"], "bash": ["bash", "-euo", "pipefail", "-c"]}
    for language, text in blocks(page):
        if named := _FILE.match(text):
            (folder / named[1]).parent.mkdir(parents=True, exist_ok=True)
            (folder / named[1]).write_text(text, encoding="utf-8")
        elif language not in FOR_PEOPLE:
            done = subprocess.run(
                [*commands[language], text],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=240,
                check=False,
            )
            assert done.returncode == 0, f"{page}: {text}\n{done.stdout}{done.stderr}"


def installed(folder: Path, *requirements: str) -> Path:
    """Install packages that are in no lock file, for one test, and return the folder of their programs.

    Without a package index the test is skipped, and `make test` says so.
    """
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, folder], check=True, timeout=60)
    programs = folder / "bin"
    command: list[str | Path] = [uv, "pip", "install", "-q", "--python", programs / "python", *requirements]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    if done.returncode:
        pytest.skip(f"the package index does not offer {', '.join(requirements)} here")
    return programs
