import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from parquet_keytools import Keytools
from parquet_keytools.errors import OutputError
from parquet_keytools.rotation import rekeying
from parquet_keytools.storage.local_files import temporary_name

REMAINS = "its blocks remain on the disk until the file system reuses them"


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def read(config: Path, folder: Path) -> list[pa.Table]:
    with Keytools.from_yaml(config) as keytools:
        return [keytools.read_table(path) for path in files_in(folder)]


def test_a_folder_is_encrypted_in_place(run, config: Path, folder: Path, table: pa.Table) -> None:
    names = files_in(folder)
    names[0].chmod(0o440)
    done = run("encrypt", folder, "--config", config, "--in-place", "--json")
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["counts"] == {"encrypted": 3} and document["complete"]
    assert "3 files: 3 encrypted" in done.stderr and REMAINS in done.stderr
    assert files_in(folder) == names
    assert stat.S_IMODE(names[0].stat().st_mode) == 0o440
    assert read(config, folder) == [table] * 3
    assert run("verify", folder, "--config", config).exit_code == 0


def test_a_repeated_run_leaves_encrypted_files_as_they_are(run, config: Path, folder: Path) -> None:
    first, *_ = files_in(folder)
    assert run("encrypt", first, "--config", config, "--in-place").exit_code == 0
    before = first.read_bytes()
    first.with_name(temporary_name("a.parquet")).write_bytes(b"PAR1, left by a killed run")
    done = run("encrypt", folder, "--config", config, "--in-place", "--json")
    assert json.loads(done.stdout)["counts"] == {"encrypted": 2, "already encrypted": 1}
    assert first.read_bytes() == before
    assert len(files_in(folder)) == 3
    done = run("encrypt", folder, "--config", config, "--in-place")
    assert done.stdout.startswith("3 files: 3 already encrypted;") and REMAINS not in done.stdout


def test_an_encrypted_file_of_another_table_fails(run, config: Path, folder: Path, table: pa.Table) -> None:
    first, *_ = files_in(folder)
    other = config.with_name("other.yaml")
    other.write_text(config.read_text().replace("{pii: [name]}", "{times: [name]}"))
    other.chmod(0o600)
    assert run("encrypt", first, "--config", other, "--in-place").exit_code == 0
    before = first.read_bytes()
    done = run("encrypt", folder, "--config", config, "--in-place", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["counts"] == {"encrypted": 2, "failed": 1}
    assert first.read_bytes() == before


def test_what_stays_in_plaintext_is_listed(run, config: Path, folder: Path, table: pa.Table) -> None:
    pq.write_table(table, folder / "_hidden.parquet")
    done = run("encrypt", folder, "--config", config, "--in-place", "--json")
    (left,) = json.loads(done.stdout)["skipped"]
    assert left["path"].endswith("_hidden.parquet")
    assert "Skipped" in done.stderr and "_hidden.parquet" in done.stderr


def test_a_file_with_another_name_fails(run, config: Path, folder: Path, tmp_path: Path) -> None:
    first, *others = files_in(folder)
    other = tmp_path / "other.parquet"
    os.link(first, other)
    before = first.read_bytes()
    done = run("encrypt", folder, "--config", config, "--in-place")
    assert done.exit_code == 1
    assert "has 2 names (hard links), and the others would keep the plaintext" in done.stderr
    assert first.read_bytes() == other.read_bytes() == before
    assert all(path.read_bytes()[:4] == b"PARE" for path in others)


def test_a_link_out_of_the_folder_is_not_followed(run, config: Path, folder: Path, plain: Path) -> None:
    (folder / plain.name).symlink_to(plain)
    before = plain.read_bytes()
    done = run("encrypt", folder, "--config", config, "--in-place")
    assert done.exit_code == 1
    assert "3 encrypted, 1 failed" in done.stdout
    assert plain.read_bytes() == before
    assert run("encrypt", folder, "--config", config, "--in-place", "--follow-links").exit_code == 0
    assert plain.read_bytes()[:4] == b"PARE" and (folder / plain.name).is_symlink()


def test_a_file_that_changes_meanwhile_is_not_replaced(
    config: Path, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = pa.table({"id": [7], "name": ["new"]})
    encrypt = rekeying.file_encryption.encrypt_opened

    def change(*arguments, **options):
        encrypt(*arguments, **options)
        pq.write_table(other, plain)

    monkeypatch.setattr(rekeying.file_encryption, "encrypt_opened", change)
    with Keytools.from_yaml(config) as keytools, pytest.raises(OutputError, match="constantly being changed"):
        keytools.encrypt_in_place(plain)
    assert pq.read_table(plain).equals(other)
    assert [path.name for path in plain.parent.glob("*parquet*")] == ["plain.parquet"]


def test_keys_that_do_not_unwrap_leave_the_plaintext(run, config: Path, folder: Path, deny) -> None:
    before = [path.read_bytes() for path in files_in(folder)]
    deny("pii")
    assert run("encrypt", folder, "--config", config, "--in-place").exit_code == 3
    assert [path.read_bytes() for path in files_in(folder)] == before


def test_a_killed_run_is_repeated(run, config: Path, folder: Path, table: pa.Table) -> None:
    program = f"""
        import os, signal
        from parquet_keytools import Keytools
        from parquet_keytools.rotation import rekeying
        check, files = rekeying.check_rekeyed, []

        def kill(*arguments, **options):
            check(*arguments, **options)
            files.append(1)
            if len(files) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        rekeying.check_rekeyed = kill
        Keytools.from_yaml({str(config)!r}).encrypt_in_place({str(folder)!r})
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False)
    assert killed.returncode == -signal.SIGKILL
    kinds = [path.read_bytes()[:4] for path in files_in(folder) if not path.name.startswith(".")]
    assert sorted(kinds) == [b"PAR1", b"PAR1", b"PARE"]
    done = run("encrypt", folder, "--config", config, "--in-place", "--json")
    assert json.loads(done.stdout)["counts"] == {"encrypted": 2, "already encrypted": 1}
    assert len(files_in(folder)) == 3
    assert read(config, folder) == [table] * 3


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--in-place", "--overwrite"], "this does not work with --in-place"),
        (["--in-place", "--skip-existing"], "this does not work with --in-place"),
        (["--follow-links"], "this works with --in-place only"),
        ([], "a file or folder to write is needed, or --in-place"),
    ],
)
def test_contradictions_are_refused(run, config: Path, plain: Path, more: list[str], why: str) -> None:
    done = run("encrypt", plain, "--config", config, *more)
    assert done.exit_code == 2
    assert why in done.stderr
    assert pq.read_table(plain).num_rows == 100


def test_a_plaintext_column_that_the_table_no_longer_decides_about_is_an_error(
    run, config: Path, folder: Path, tmp_path: Path
) -> None:
    """After the default of `unlisted_columns` changed, or a column was removed from a list."""
    settings = config.read_text()
    assert "    unlisted_columns: plaintext\n" in settings
    target = tmp_path / "target"
    assert run("encrypt", folder, target, "--config", config).exit_code == 0
    config.write_text(settings.replace("    unlisted_columns: plaintext\n", ""))
    for options in ((folder, target, "--skip-existing"), (folder, target, "--skip-existing=unauthenticated")):
        done = run("encrypt", *options, "--config", config)
        assert done.exit_code != 0 and "does not say how to protect" in done.stderr
    done = run("encrypt", target, "--in-place", "--config", config)
    assert done.exit_code != 0 and "columns are plaintext that table 'people' does not list" in done.stderr
