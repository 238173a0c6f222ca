"""README.md and the first tutorial work as printed: their blocks run in order, in a fresh folder each."""

import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import typer
from warm_python import WarmPython

from parquet_keytools import errors, load_configuration
from parquet_keytools.cli import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ERRORS = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
MAX_LINES = 250


class Block(NamedTuple):
    line: int
    language: str
    text: str


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page; `console` blocks are for people only."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(text.count("\n", 0, found.start()) + 1, found[1], found[2])
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def run(arguments: list[str | Path], folder: Path, programs: Path) -> None:
    environment = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", ["README.md", "docs/first-steps.md"])
def test_all_blocks_run_as_printed(page: str, tmp_path: Path, warm_python: WarmPython) -> None:
    programs = warm_python.command.parent
    seen = set()
    for block in blocks(page):
        seen.add(block.language)
        place = f"{page}, block in line {block.line}"
        try:
            match block.language:
                case "yaml":
                    name = block.text.partition("\n")[0].removeprefix("# ")
                    assert re.fullmatch(r"\w+\.yaml", name), "a YAML block starts with its file name"
                    (tmp_path / name).write_text(block.text, encoding="utf-8")
                    assert load_configuration(tmp_path / name).tables
                case "python":
                    run([warm_python.python, "-c", block.text], tmp_path, programs)
                case "bash":
                    run(["bash", "-euo", "pipefail", "-c", block.text], tmp_path, programs)
                case "console":
                    assert all(line.startswith("$ ") for line in block.text.splitlines())
                case other:
                    pytest.fail(f"nobody runs blocks of {other!r}")
        except AssertionError as error:
            raise AssertionError(f"{place}: {error}") from None
    assert seen >= {"yaml", "python", "bash"}


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= MAX_LINES


def test_make_has_what_is_named() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"\$ make (\w+)", README))
    assert {"demo", "test"} <= named
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in named)


def test_all_commands_are_named() -> None:
    section = README.partition("## Command line")[2].partition("\n## ")[0]
    named = set(re.findall(r"^\| `([a-z0-9-]+)[ `]", section, re.MULTILINE))
    assert named == set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_all_errors_are_named() -> None:
    kinds = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.KeytoolsError) and not name.startswith("_")
    }
    named = set(re.findall(r"\b[A-Z]\w+Error\b", ERRORS))
    # Base classes that are never raised themselves, and exceptions of Python and pyarrow.
    assert named - {"OSError"} - kinds == set()
    assert kinds - named - {"KmsError"} == set()
