"""The wheel is the same on every machine, and holds exactly the required files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "parquet_keytools"
EPOCH = "1767225600"


def copy_of_sources(folder: Path) -> Path:
    """Return a folder with the inputs of a build, whose files are as old as this copy."""
    folder.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copyfile(ROOT / name, folder / name)
    for name in ("src", "tests"):
        shutil.copytree(
            ROOT / name, folder / name, copy_function=shutil.copyfile, ignore=shutil.ignore_patterns("__pycache__")
        )
    return folder


def build(sources: Path, kind: str, target: Path, **environment: str) -> Path:
    """Build a wheel or a source distribution, and return it."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)]
    done = subprocess.run(
        command,
        cwd=sources,
        env=os.environ | {"SOURCE_DATE_EPOCH": EPOCH} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    (made,) = target.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return build(copy_of_sources(folder / "sources"), "wheel", folder / "dist", PYTHONHASHSEED="1", TZ="UTC")


@pytest.fixture
def strict_mask() -> Iterator[None]:
    """New files are accessible only to their owner, as they may be on another machine."""
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.mark.usefixtures("strict_mask")
def test_another_build_elsewhere_makes_the_same_bytes(wheel: Path, tmp_path: Path) -> None:
    sources = copy_of_sources(tmp_path / "another folder" / "with a longer name")
    for number, file in enumerate(sorted(sources.rglob("*"))):
        os.utime(file, (number, number))
    # Leftovers of builds and tests.
    (sources / "src" / "parquet_keytools" / "__pycache__").mkdir()
    (sources / "src" / "parquet_keytools" / "__pycache__" / "errors.cpython-311.pyc").write_bytes(b"old")
    again = build(sources, "wheel", tmp_path / "dist", PYTHONHASHSEED="2", TZ="Asia/Kathmandu", LC_ALL="C")
    assert again.name == wheel.name
    assert again.read_bytes() == wheel.read_bytes()


def test_the_source_distribution_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    archive = build(copy_of_sources(tmp_path / "sources"), "sdist", tmp_path / "sdist")
    shutil.unpack_archive(archive, tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert (unpacked / "tests" / "packaging" / "test_wheel.py").is_file()
    assert build(unpacked, "wheel", tmp_path / "dist").read_bytes() == wheel.read_bytes()


def test_a_change_is_seen(wheel: Path, tmp_path: Path) -> None:
    sources = copy_of_sources(tmp_path / "sources")
    with (sources / "src" / "parquet_keytools" / "errors.py").open("a", encoding="utf-8") as file:
        file.write("\n")
    assert build(sources, "wheel", tmp_path / "dist").read_bytes() != wheel.read_bytes()


def test_it_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    package = {
        f"parquet_keytools/{file.relative_to(PACKAGE).as_posix()}"
        for file in PACKAGE.rglob("*")
        if file.is_file() and file.parent.name != "__pycache__"
    }
    facts = {name for name in names if ".dist-info/" in name}
    assert names - facts == package
    assert "parquet_keytools/py.typed" in package
    assert any(name.endswith("/KeytoolsCryptoFactory.java") for name in package)
    assert {name.partition(".dist-info/")[2] for name in facts} == {
        "METADATA",
        "RECORD",
        "WHEEL",
        "entry_points.txt",
        "licenses/LICENSE",
    }


def test_its_times_are_those_asked_for(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        assert {info.date_time for info in opened.infolist()} == {(2026, 1, 1, 0, 0, 0)}
