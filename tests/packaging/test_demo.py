"""The demo runs, leaves nothing readable behind, and the commands that it prints work."""

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from warm_python import WarmPython


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    (folder / "bin").symlink_to(warm_python.command.parent)
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def output(folder: Path) -> str:
    done = run(folder, "bin/parquet-keytools", "demo")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_it_reports_each_step(output: str) -> None:
    for text in ("336,776", "3 KMS calls to wrap", "All 19 columns are equal", "3 KMS calls to unwrap"):
        assert text in output
    assert output.count("ColumnAccessDeniedError") == 1
    assert "The other 18 columns can still be read" in output


def test_it_rotates_a_master_key_and_reads_again(output: str) -> None:
    section = output.partition("5. Rotate the master key pii")[2].partition("\n6. ")[0]
    assert "pii: version 1 -> 2, 1 key re-wrapped" in section
    # Only the tail is new; the data is not read.
    copied, new = re.findall(r"([0-9,]+) bytes", section)
    assert int(new.replace(",", "")) < 20_000 < 1_000_000 < int(copied.replace(",", ""))
    assert "Version 1 is disabled: all 19 columns are still read, and equal." in section


def test_nothing_readable_stays_behind(output: str, folder: Path) -> None:
    made = folder / "demo"
    names = {"flights.yaml", "flights.parquet", "keystore.json", "passphrase", ".keystore.json.lock"}
    assert {file.name for file in made.iterdir()} == names
    for name in ("passphrase", "keystore.json"):
        assert stat.S_IMODE((made / name).stat().st_mode) == 0o600
    with pytest.raises(OSError):
        pq.read_table(made / "flights.parquet")
    assert (made / "passphrase").read_text().strip() not in output


def test_the_commands_work_as_printed(output: str, folder: Path) -> None:
    commands = [line for line in output.splitlines() if line.startswith("  bin/parquet-keytools ")]
    assert len(commands) == 5
    for command in commands:
        done = run(folder, "bash", "-c", command)
        assert done.returncode == 0, f"{command}: {done.stderr}"
    assert pq.read_metadata(folder / "demo" / "decrypted.parquet").num_rows == 336_776


@pytest.mark.skipif(os.name != "posix", reason="shell quoting is that of POSIX")
def test_a_folder_with_other_content_is_refused(tmp_path: Path, folder: Path) -> None:
    other = tmp_path / "my files"
    other.mkdir()
    (other / "flights.yaml").write_text("version: 1\n")
    done = run(folder, "bin/parquet-keytools", "demo", "--folder", str(other))
    assert done.returncode == 2
    assert "not from an earlier demo" in done.stderr
    assert [file.name for file in other.iterdir()] == ["flights.yaml"]


def test_a_folder_of_an_earlier_demo_is_replaced_and_its_spaces_are_quoted(
    output: str, folder: Path, tmp_path: Path
) -> None:
    """Here the program starts as it does for users, without any imports."""
    program = tmp_path / "parquet-keytools"
    program.write_text(f"#!{sys.executable}\nfrom parquet_keytools.cli import main\nmain()\n", encoding="utf-8")
    program.chmod(0o755)
    other = tmp_path / "my files"
    shutil.copytree(folder / "demo", other)
    (other / "note.txt").write_text("mine")
    (other / "decrypted.parquet").touch()
    before = (other / "passphrase").read_bytes()
    done = run(tmp_path, str(program), "demo", "--folder", str(other))
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if " check " in line)
    assert shlex.split(line)[2] == str(other / "flights.yaml")
    assert (other / "passphrase").read_bytes() != before
    assert not (other / "decrypted.parquet").exists()
    assert (other / "note.txt").read_text() == "mine"
