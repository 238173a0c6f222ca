"""CONTRIBUTING.md: its KMS backend works as printed, and the names on the page exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```\w+\n# ([\w.]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FOLDERS = ("benchmarks", "configs", "docs", "examples", "src", "tests")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of the page, with its files as printed."""
    folder = tmp_path_factory.mktemp("acme-kms")
    for found in BLOCK.finditer(PAGE):
        (folder / found[1]).write_text(found[2], encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def installed(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that it is installed in: its wheel is unpacked there."""
    target = tmp_path_factory.mktemp("installed")
    done = run(["-m", "hatchling", "build", "-t", "wheel", "-d", str(target / "dist")], package)
    assert done.returncode == 0, done.stderr
    (wheel,) = (target / "dist").iterdir()
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(target)
    return target


def run(arguments: list[str], folder: Path, *paths: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=120
    )


def test_the_page_shows_all_files_that_it_lists(package: Path) -> None:
    (listing,) = re.findall(r"^acme-kms/\n(.*?)^```$", PAGE, re.M | re.S)
    assert {file.name for file in package.iterdir()} == set(re.findall(r"^  (\S+)", listing, re.M))


def test_its_backend_passes_the_contract(package: Path, installed: Path) -> None:
    done = run(["-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", "."], package, installed)
    assert done.returncode == 0, done.stdout + done.stderr
    (passed,) = re.findall(r"^(\d+) passed", done.stdout, re.M)
    assert int(passed) >= 30


def test_a_configuration_finds_it(package: Path, installed: Path) -> None:
    program = """
import os, sys
from acme_server import AcmeServer
server = AcmeServer("one", "two", token="secret token")
os.environ |= {"ACME_URL": server.url, "ACME_TOKEN": "secret token"}
sys.argv = ["parquet-keytools", "check", "acme.yaml"]
from parquet_keytools.cli import main
main()
"""
    done = run(["-c", program], package, installed, package)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^ +(one|two) .* acme +ok", done.stdout, re.M) == ["one", "two"], done.stderr
    assert "secret token" not in done.stdout + done.stderr


def _named_paths() -> Iterator[str]:
    for text in re.findall(r"`([^`\s]+)`", PAGE):
        if text.partition("/")[0] in FOLDERS and "/" in text:
            yield text


@pytest.mark.parametrize("path", sorted(set(_named_paths())))
def test_what_it_names_is_there(path: str) -> None:
    assert (ROOT / path).exists()


def test_make_has_what_is_named() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"\bmake ([a-z]+)\b", "\n".join(re.findall(r"`[^`]+`|^\$ .*$", PAGE, re.M))))
    assert {"check", "test", "docs", "soak"} <= named
    assert {target for target in named if not re.search(rf"^{target}:", makefile, re.MULTILINE)} == set()


def test_the_words_are_those_of_the_package() -> None:
    """A class or function on the page that no longer exists in the package is detected."""
    files = [file for folder in ("src", "tests") for file in (ROOT / folder).rglob("*.py")]
    words = {word for file in files for word in re.findall(r"\w+", file.read_text(encoding="utf-8"))}
    prose = re.sub(r"^```.*?^```$", "", PAGE, flags=re.M | re.S)
    names = re.findall(r"`(_?[a-z]+(?:_[a-z]+)+|[A-Z]\w+|[A-Z]+)`", prose)
    assert "_wrap_many" in names and "KmsClientContract" in names
    foreign = {"PARQUET_TEST_DATA", "DeprecationWarning"}
    assert set(names) - words - foreign == set()
