import base64
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from parquet_keytools import Keytools
from parquet_keytools.cli.output import Messages
from parquet_keytools.encryption import file_encryption

PROGRAM = [sys.executable, "-c", "from parquet_keytools.cli import main; main()"]
PARTS = ["year=1/a.parquet", "year=1/b.parquet", "year=2/c.parquet"]


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_real_process_encrypts_what_is_rekeyed_and_decrypted(
    run, config: Path, plain: Path, tmp_path: Path, table: pa.Table
) -> None:
    encrypted, rekeyed, decrypted = (tmp_path / name for name in ("e.parquet", "r.parquet", "d.parquet"))
    for command, source, target in (
        ("encrypt", plain, encrypted),
        ("rekey", encrypted, rekeyed),
        ("decrypt", rekeyed, decrypted),
    ):
        arguments = (command, source, target, "--config", config)
        if command == "encrypt":
            process = subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True)
            done = SimpleNamespace(exit_code=process.returncode, stdout=process.stdout, stderr=process.stderr)
        else:
            done = run(*arguments)
        assert (done.exit_code, done.stderr) == (0, "")
        assert done.stdout.startswith(f"{command.capitalize().removesuffix('e')}")
        assert str(target) in done.stdout
    assert encrypted.read_bytes()[:4] == b"PARE"
    assert encrypted.read_bytes() != rekeyed.read_bytes()
    assert Keytools.from_yaml(config).read_table(rekeyed).equals(table)
    assert pq.read_table(decrypted).equals(table)


def test_json_goes_to_stdout(run, config: Path, plain: Path, tmp_path: Path) -> None:
    target = tmp_path / "e.parquet"
    done = run("encrypt", plain, target, "--config", config, "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout) == {
        "files": [
            {
                "source": str(plain),
                "target": str(target),
                "source_bytes": plain.stat().st_size,
                "target_bytes": target.stat().st_size,
                "skipped": False,
                "copied": False,
                "plaintext_columns": ["id"],
            }
        ],
        "failures": [],
        "skipped": [],
    }


def test_results_list_the_plaintext_columns(run, config: Path, plain: Path, folder: Path, tmp_path: Path) -> None:
    text = "In plaintext: 1 column: id\n"
    encrypted, rekeyed, decrypted = (tmp_path / name for name in ("e.parquet", "r.parquet", "d.parquet"))
    assert text in run("encrypt", plain, encrypted, "--config", config).stdout
    assert text in run("rekey", encrypted, rekeyed, "--config", config).stdout
    assert "In plaintext" not in run("decrypt", rekeyed, decrypted, "--config", config).stdout
    assert run("encrypt", folder, tmp_path / "all", "--config", config).stdout.count("In plaintext") == 1
    done = run("encrypt", folder, "--config", config, "--in-place", "--json")
    assert [file["plaintext_columns"] for file in json.loads(done.stdout)["files"]] == [["id"]] * 3
    assert text in done.stderr
    assert text in run("rekey", folder, "--config", config, "--in-place").stdout
    with Keytools.from_yaml(config) as keytools:
        assert keytools.encrypt_file(plain, tmp_path / "f.parquet").plaintext_columns == ("id",)
    config.write_text(config.read_text().replace("unlisted_columns: plaintext", "unlisted_columns: footer_key"))
    assert "In plaintext" not in run("encrypt", plain, tmp_path / "g.parquet", "--config", config).stdout


def test_uris(run, config: Path, plain: Path, tmp_path: Path) -> None:
    target = tmp_path / "e.parquet"
    assert run("encrypt", plain.as_uri(), target.as_uri(), "--config", config).exit_code == 0
    done = run("encrypt", plain, plain.as_uri(), "--config", config, "--overwrite")
    assert done.exit_code == 2
    assert "is the source itself" in done.stderr
    done = run("encrypt", "s3x://name:SECRET@bucket/x", target, "--config", config)
    assert done.exit_code == 2
    assert "SECRET" not in done.output


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("[name]", "[nme]"), "'nme' matches no column"),
        (("people:", "persons:"), "there is no table 'people'"),
    ],
)
def test_a_wrong_configuration_writes_nothing(
    run, config: Path, folder: Path, tmp_path: Path, change: tuple[str, str], text: str
) -> None:
    config.write_text(config.read_text().replace(*change))
    target = tmp_path / "out"
    done = run("encrypt", folder, target, "--config", config, "--table", "people", "--json")
    assert (done.exit_code, done.stdout) == (2, "")
    assert text in done.stderr
    assert not target.exists() or names(target) == []


def test_generated_master_keys_are_refused(run, config: Path, plain: Path, tmp_path: Path) -> None:
    config.write_text(
        "version: 1\nkms: {type: in_memory, keys: [footer]}\n"
        "tables: {people: {footer_key: footer, unlisted_columns: footer_key}}\n"
    )
    done = run("encrypt", plain, tmp_path / "e.parquet", "--config", config)
    assert done.exit_code == 2
    assert "no other can decrypt" in done.stderr
    assert not (tmp_path / "e.parquet").exists()


def test_what_exists_is_not_overwritten_unasked(run, config: Path, plain: Path, folder: Path) -> None:
    target = plain.with_name("e.parquet")
    target.write_text("precious")
    done = run("encrypt", plain, target, "--config", config)
    assert done.exit_code == 2
    assert "--overwrite" in done.stderr
    assert target.read_text() == "precious"
    assert run("encrypt", plain, target, "--config", config, "--overwrite").exit_code == 0
    assert target.read_bytes()[:4] == b"PARE"

    other = folder.with_name("out")
    (other / "kept").mkdir(parents=True)
    (other / "kept" / "file").write_text("precious")
    done = run("encrypt", folder, other, "--config", config)
    assert done.exit_code == 2
    assert "is not empty" in done.stderr
    assert run("encrypt", folder, other, "--config", config, "--overwrite").exit_code == 0
    assert names(other) == ["kept/file", *PARTS]


def test_a_folder_is_mirrored(run, config: Path, folder: Path, tmp_path: Path, table: pa.Table) -> None:
    for name in ("_SUCCESS", "_metadata", "notes.txt"):
        (folder / name).write_text("text")
    target, back = tmp_path / "out", tmp_path / "back"
    done = run("encrypt", folder, target, "--config", config, "--json")
    assert done.exit_code == 0
    assert names(target) == PARTS
    answer = json.loads(done.stdout)
    assert [file["target"] for file in answer["files"]] == [str(target / name) for name in PARTS]
    assert [left["path"] for left in answer["skipped"]] == [
        str(folder / name) for name in ("_SUCCESS", "_metadata", "notes.txt")
    ]
    assert f"Skipped: {folder / '_metadata'}: a summary of footers" in done.stderr
    assert "Encrypted 3 files" in done.stderr
    assert run("decrypt", target, back, "--config", config).exit_code == 0
    assert names(back) == PARTS
    assert all(pq.ParquetFile(back / name).read().equals(table) for name in PARTS)


def test_values_of_a_column_under_a_key_do_not_stay_in_the_names_of_folders(
    run, config: Path, folder: Path, tmp_path: Path
) -> None:
    """A glob that also matches another column of the files is no error for missing columns."""
    target = tmp_path / "target"
    (folder / "na%6De2=of somebody").mkdir()
    (folder / "year=1" / "a.parquet").rename(folder / "na%6De2=of somebody" / "a.parquet")
    text = config.read_text()
    assert "[name]" in text
    config.write_text(text.replace("[name]", '["nam*"]'))
    done = run("encrypt", folder, target, "--config", config)
    assert done.exit_code == 2 and not target.exists()
    assert "'name2' are in the names of folders" in done.stderr
    config.write_text(text.replace("[name]", "[name, name2.part]"))
    assert "has it under the key" in run("encrypt", folder, target, "--config", config).stderr
    config.write_text(text)
    done = run("encrypt", folder, target, "--config", config)
    assert done.exit_code == 0


def test_external_key_material_stays_beside_its_file(run, config: Path, folder: Path, tmp_path: Path) -> None:
    config.write_text(config.read_text() + "    key_material: external\n")
    out, again, back = (tmp_path / name for name in ("out", "again", "back"))
    assert run("encrypt", folder, out, "--config", config).exit_code == 0
    assert "year=1/_KEY_MATERIAL_FOR_a.parquet.json" in names(out)
    for command, source, target in (("rekey", out, again), ("decrypt", out, back)):
        done = run(command, source, target, "--config", config, "--json")
        assert (done.exit_code, json.loads(done.stdout)["skipped"]) == (0, []), done.stderr
    assert names(again) == names(out)
    assert names(back) == PARTS


def test_a_file_that_fails_does_not_keep_the_others(run, config: Path, folder: Path, tmp_path: Path) -> None:
    (folder / "year=1" / "a.parquet").write_text("not Parquet at all")
    target = tmp_path / "out"
    done = run("encrypt", folder, target, "--config", config, "--json")
    assert done.exit_code == 1
    (failure,) = json.loads(done.stdout)["failures"]
    assert failure["source"] == str(folder / PARTS[0])
    assert failure["error"] == "ParquetFormatError"
    assert f"Failed: {folder / PARTS[0]}: " in done.stderr
    assert "Encrypted 2 of 3 files" in done.stderr
    assert names(target) == PARTS[1:]


def test_a_file_that_the_configuration_does_not_fit(run, config: Path, folder: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1]}), folder / "z.parquet")
    done = run("encrypt", folder, tmp_path / "out", "--config", config, "--json")
    assert done.exit_code == 1
    assert f"Failed: {folder / 'z.parquet'}: {config}" in done.stderr
    (failure,) = json.loads(done.stdout)["failures"]
    assert failure["error"] == "ConfigurationError"
    assert len(json.loads(done.stdout)["files"]) == 3
    (folder / "0.parquet").write_bytes((folder / "z.parquet").read_bytes())
    done = run("encrypt", folder, tmp_path / "other", "--config", config)
    assert done.exit_code == 2
    assert f"Stopped at the first of 5 files, {folder / '0.parquet'}." in done.stderr


def test_a_kms_that_refuses_is_3(run, config: Path, folder: Path, plain: Path, tmp_path: Path, deny) -> None:
    encrypted = tmp_path / "encrypted"
    assert run("encrypt", folder, encrypted, "--config", config).exit_code == 0
    deny("pii")
    target = tmp_path / "out"
    done = run("encrypt", folder, target, "--config", config, "--json")
    assert done.exit_code == 3
    assert {failure["error"] for failure in json.loads(done.stdout)["failures"]} == {"KmsAccessDeniedError"}
    assert run("encrypt", plain, tmp_path / "e.parquet", "--config", config).exit_code == 3
    done = run("decrypt", encrypted, target, "--config", config, "--json")
    assert done.exit_code == 3
    assert {failure["error"] for failure in json.loads(done.stdout)["failures"]} == {"ColumnAccessDeniedError"}
    assert names(target) == []


def test_kms_and_file_failures_together_are_1(run, config: Path, folder: Path, tmp_path: Path, deny) -> None:
    (folder / "year=1" / "a.parquet").write_text("not Parquet at all")
    deny("pii")
    assert run("encrypt", folder, tmp_path / "out", "--config", config).exit_code == 1


def test_a_plaintext_file_is_copied_where_that_is_allowed(run, config: Path, folder: Path, tmp_path: Path) -> None:
    done = run("decrypt", folder, tmp_path / "out", "--config", config)
    assert done.exit_code == 1 and "set `plaintext_files: allow` under `reading`" in done.stderr
    config.write_text(config.read_text() + "reading: {plaintext_files: allow}\n")
    done = run("decrypt", folder, tmp_path / "out", "--config", config, "--overwrite")
    assert done.exit_code == 0
    assert "Copied as they are: 3 files in plaintext, as `plaintext_files: allow` says." in done.stderr
    for name in PARTS:
        copy = tmp_path / "out" / name
        assert copy.read_bytes() == (folder / name).read_bytes() and copy.stat().st_mode & 0o777 == 0o600
    document = json.loads(run("decrypt", folder, tmp_path / "two", "--config", config, "--json").stdout)
    assert [file["copied"] for file in document["files"]] == [True] * 3
    done = run("decrypt", folder, tmp_path / "two", "--config", config, "--skip-existing")
    assert done.exit_code == 0 and "3 skipped" in done.stdout


def test_what_is_encrypted_already_and_what_is_not(run, config: Path, plain: Path, tmp_path: Path) -> None:
    encrypted = tmp_path / "e.parquet"
    assert run("encrypt", plain, encrypted, "--config", config).exit_code == 0
    done = run("encrypt", encrypted, tmp_path / "x.parquet", "--config", config)
    assert done.exit_code == 2
    assert "rekey" in done.stderr
    for command in ("decrypt", "rekey"):
        done = run(command, plain, tmp_path / "x.parquet", "--config", config)
        assert done.exit_code == 2
        assert "is not encrypted" in done.stderr
    assert not (tmp_path / "x.parquet").exists()


def test_an_altered_file_is_1(run, config: Path, plain: Path, tmp_path: Path) -> None:
    encrypted = tmp_path / "e.parquet"
    assert run("encrypt", plain, encrypted, "--config", config).exit_code == 0
    content = bytearray(encrypted.read_bytes())
    content[-20] ^= 1
    encrypted.write_bytes(content)
    done = run("decrypt", encrypted, tmp_path / "d.parquet", "--config", config)
    assert done.exit_code == 1
    assert not (tmp_path / "d.parquet").exists()


def test_the_aad_prefix_can_be_supplied(run, config: Path, plain: Path, tmp_path: Path, table: pa.Table) -> None:
    writer = tmp_path / "writer.yaml"
    writer.write_text(config.read_text() + "    aad_prefix: place\n    store_aad_prefix: false\n")
    encrypted, target = tmp_path / "e.parquet", tmp_path / "d.parquet"
    assert run("encrypt", plain, encrypted, "--config", writer).exit_code == 0
    for command in ("decrypt", "rekey"):
        arguments = [command, encrypted, target, "--overwrite", "--config", config]
        assert run(*arguments).exit_code == 1
        assert run(*arguments, "--aad-prefix", "other").exit_code == 1
        assert run(*arguments, "--aad-prefix", "place").exit_code == 0
    assert Keytools.from_yaml(config).read_table(target).equals(table)


def test_rekey_to_another_table_and_configuration(
    run, config: Path, plain: Path, tmp_path: Path, table: pa.Table
) -> None:
    config.write_text(
        config.read_text()
        + "  signed:\n    footer_key: times\n    plaintext_footer: true\n    column_keys: {pii: [id]}\n"
        "    unlisted_columns: plaintext\n"
    )
    other = tmp_path / "other.yaml"
    key = base64.b64encode(bytes(range(16))).decode()
    other.write_text(
        f"version: 1\nkms: {{type: in_memory, keys: {{mine: {key}}}}}\n"
        "tables: {theirs: {footer_key: mine, unlisted_columns: footer_key}}\n"
    )
    encrypted, target = tmp_path / "e.parquet", tmp_path / "r.parquet"
    common = ["--config", config, "--table", "people"]
    assert run("encrypt", plain, encrypted, *common).exit_code == 0
    assert run("rekey", encrypted, target, *common, "--to-table", "signed").exit_code == 0
    assert target.read_bytes()[:4] == b"PAR1"
    assert pq.read_schema(target).names == table.schema.names
    done = run("rekey", encrypted, target, *common, "--to-table", "signd", "--overwrite")
    assert done.exit_code == 2
    assert "Did you mean 'signed'?" in done.stderr
    assert run("rekey", encrypted, target, *common, "--to-config", other, "--overwrite").exit_code == 0
    assert Keytools.from_yaml(other).read_table(target).equals(table)


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_an_interruption_leaves_nothing_partial(
    run,
    config: Path,
    plain: Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    signal_number: signal.Signals,
) -> None:
    original, calls = file_encryption.encrypt_opened, []

    def encrypt_file(source, sink, *arguments, **options):
        calls.append(source.path)
        if kind == "folder" and len(calls) < 3:
            return original(source, sink, *arguments, **options)
        sink.reserve(100)
        sink.write_at(0, b"half of it")
        if signal_number == signal.SIGINT:
            raise KeyboardInterrupt
        # It is raised in the main thread, which is this one or waits for it.
        os.kill(os.getpid(), signal_number)
        raise OSError(5, "the file system failed, too")

    monkeypatch.setattr(file_encryption, "encrypt_opened", encrypt_file)
    target = tmp_path / "out" / "e.parquet"
    target.parent.mkdir()
    source = plain if kind == "file" else folder
    done = run("encrypt", source, target, "--config", config, "--json")
    status, said = (130, "Interrupted.\n") if signal_number == signal.SIGINT else (143, "Terminated.\n")
    assert (done.exit_code, done.stdout) == (status, "")
    if kind == "file":
        assert done.stderr == said
        assert names(target.parent) == []
    else:
        # The second file may be complete before or after the third one is interrupted.
        assert done.stderr in (
            f"{number} of 3 files were encrypted before this. Continue with --skip-existing, or do all "
            f"of them again with --overwrite.\n{said}"
            for number in (1, 2)
        )
        # The first is written alone, the others at the same time.
        assert names(target) in ([PARTS[0], other] for other in PARTS[1:])


@pytest.mark.parametrize("command", ["encrypt", "decrypt", "rekey"])
def test_a_run_that_was_cut_off_is_continued(
    run, config: Path, folder: Path, tmp_path: Path, command: str
) -> None:
    source, target = folder, tmp_path / "target"
    if command != "encrypt":
        source = tmp_path / "encrypted"
        assert run("encrypt", folder, source, "--config", config).exit_code == 0
    ask = (command, source, target, "--config", config, "--skip-existing")
    assert run(*ask).exit_code == 0
    (target / PARTS[1]).unlink()
    kept = (target / PARTS[0]).read_bytes()
    done = run(*ask)
    assert done.exit_code == 0 and "1 of 3 files: " in done.stdout and "2 skipped, made before." in done.stdout
    assert names(target) == PARTS and (target / PARTS[0]).read_bytes() == kept
    document = json.loads(run(*ask, "--json").stdout)
    assert [file["skipped"] for file in document["files"]] == [True] * 3
    # Files that this command did not make stay, and are an error.
    (target / PARTS[0]).write_bytes(b"somebody's")
    done = run(*ask)
    assert done.exit_code == 1 and "differs from what converting" in done.stderr
    assert (target / PARTS[0]).read_bytes() == b"somebody's"
    done = run(*ask, "--overwrite")
    assert done.exit_code == 0 and "2 skipped" in done.stdout


def test_one_file_that_is_there_is_skipped(run, config: Path, plain: Path, tmp_path: Path) -> None:
    ask = ("encrypt", plain, tmp_path / "e.parquet", "--config", config, "--skip-existing")
    assert run(*ask).stdout.startswith("Encrypted")
    assert run(*ask).stdout == f"Skipped: {tmp_path / 'e.parquet'} was made from {plain} before.\n"
    done = run(
        "decrypt", tmp_path / "e.parquet", tmp_path / "s", "--config", config, "--salvage", "--skip-existing"
    )
    assert done.exit_code == 2
    done = run("rekey", tmp_path / "e.parquet", "--config", config, "--in-place", "--skip-existing")
    assert done.exit_code == 2


def test_a_progress_bar_on_a_terminal_only(on_a_terminal, config: Path, plain: Path, tmp_path: Path) -> None:
    shown, stdout = on_a_terminal("encrypt", plain, tmp_path / "e.parquet", "--config", config, "--json")
    assert "━" in shown
    assert len(json.loads(stdout)["files"]) == 1


def test_decrypted_files_are_no_more_open_than_their_source(
    run, config: Path, plain: Path, tmp_path: Path
) -> None:
    encrypted, back, salvaged = (tmp_path / name for name in ("e.parquet", "d.parquet", "s.parquet"))
    assert run("encrypt", plain, encrypted, "--config", config).exit_code == 0
    encrypted.chmod(0o600)
    assert run("decrypt", encrypted, back, "--config", config).exit_code == 0
    assert run("decrypt", encrypted, salvaged, "--config", config, "--salvage").exit_code == 0
    assert {path.stat().st_mode & 0o777 for path in (back, salvaged)} == {0o600}


def test_a_pipe_as_input_is_refused(run, config: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.parquet")
    for command in (
        ["encrypt", tmp_path / "pipe.parquet", tmp_path / "e.parquet", "--config", config],
        ["decrypt", tmp_path / "pipe.parquet", tmp_path / "e.parquet", "--config", config],
        ["verify", tmp_path / "pipe.parquet", "--config", config],
        ["inspect", tmp_path / "pipe.parquet"],
    ):
        done = run(*command)
        assert done.exit_code == (2 if command[0] == "inspect" else 1), command
        said = done.stdout if command[0] == "verify" else done.stderr
        assert "neither a file nor a folder" in said or "not a regular file" in said, command


NOT_UTF8 = os.fsdecode(b"caf\xe9")


@pytest.mark.parametrize("command", [["decrypt", "SRC", "DST"], ["verify", "SRC"], ["inspect", "SRC"]])
def test_an_aad_prefix_that_is_not_utf8(
    run, config: Path, plain: Path, tmp_path: Path, command: list[str]
) -> None:
    paths = {"SRC": plain, "DST": tmp_path / "d.parquet"}
    done = run(*(paths.get(word, word) for word in command), "--config", config, "--aad-prefix", NOT_UTF8)
    assert done.exit_code == 2
    assert "--aad-prefix" in done.stderr and "not valid UTF-8" in done.stderr


def test_a_file_name_that_is_not_utf8(run, config: Path, plain: Path, folder: Path, tmp_path: Path) -> None:
    try:
        odd = folder / f"{NOT_UTF8}.parquet"
        odd.write_bytes(plain.read_bytes())
    except OSError:
        pytest.skip("this file system takes no such names")
    done = run("encrypt", odd, tmp_path / "e.parquet", "--config", config)
    assert done.exit_code == 2 and "not valid UTF-8" in done.stderr
    done = run("encrypt", folder, tmp_path / "out", "--config", config)
    assert done.exit_code == 1
    assert "caf\\xe9.parquet: this name is not valid UTF-8: rename it." in done.stderr
    assert "3 of 4 files" in done.stdout


def test_equal_messages_are_one_line(run, config: Path, folder: Path, tmp_path: Path) -> None:
    for number in range(25):
        (folder / f".a.{number:02}.crc").write_text("text")
        (folder / f"b.{number:02}.parquet").write_bytes(b"text" * 3)
    done = run("encrypt", folder, tmp_path / "out", "--config", config, "--json")
    assert done.exit_code == 1
    document = json.loads(done.stdout)
    assert (len(document["skipped"]), len(document["failures"])) == (25, 25)
    left_out, failed = [line for line in done.stderr.splitlines() if line.startswith(("Skipped: ", "Failed: "))]
    assert left_out.startswith("Skipped: 25 files: ") and failed.startswith("Failed: 25 files: ")
    assert left_out.endswith(f" For example: {', '.join(str(folder / f'.a.{n:02}.crc') for n in range(3))}")
    assert failed.endswith(f" For example: {', '.join(str(folder / f'b.{n:02}.parquet') for n in range(3))}")
    done = run("encrypt", folder, tmp_path / "out", "--config", config, "--overwrite", "--verbose")
    assert done.stderr.count("Skipped: /") == 25 and done.stderr.count("Failed: /") == 25
    assert "For example" not in done.stderr


def test_many_different_messages_are_not_all_shown(capsys: pytest.CaptureFixture[str]) -> None:
    messages = Messages("Failed")
    for number in range(25):
        messages.add(f"/data/{number}.parquet", f"/data/{number}.parquet: flaw {number}.")
    messages.add("/data/x.parquet", "flaw 3.")
    messages.print()
    lines = capsys.readouterr().err.splitlines()
    assert lines[2:4] == [
        "Failed: /data/2.parquet: flaw 2.",
        "Failed: 2 files: flaw 3. For example: /data/3.parquet, /data/x.parquet",
    ]
    assert lines[20:] == ["Failed: 5 more; --verbose shows all."]


@pytest.mark.parametrize("command", ["encrypt", "decrypt"])
def test_a_full_disk_is_said_once(run, config, plain, tmp_path, monkeypatch, command: str) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for number in range(9):
        place = source / f"{number}.parquet"
        if command == "encrypt":
            place.write_bytes(plain.read_bytes())
        else:
            assert run("encrypt", plain, place, "--config", config).exit_code == 0

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    # Without preallocation, the disk is full when the file is written.
    monkeypatch.setattr("os.posix_fallocate" if hasattr(os, "posix_fallocate") else "os.pwrite", full)
    done = run(command, source, target, "--config", config)
    text = " ".join(done.stderr.split())
    assert done.exit_code == 1
    assert text.count("no space left") == 1 and "Not attempted: 8 of 9 files" in text, text
    assert [path for path in target.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(("mode", "expected"), [(None, 0o600), ("640", 0o640), ("0644", 0o644)])
def test_decrypted_files_have_the_mode_that_is_given(run, config, plain, tmp_path, mode, expected: int) -> None:
    assert run("encrypt", plain, tmp_path / "e.parquet", "--config", config).exit_code == 0
    options = [] if mode is None else ["--mode", mode]
    target = tmp_path / "d.parquet"
    assert run("decrypt", tmp_path / "e.parquet", target, "--config", config, *options).exit_code == 0
    assert target.stat().st_mode & 0o777 == expected


@pytest.mark.parametrize("mode", ["7777", "abc", "044", "999", "-1", "u+r"])
def test_what_is_no_mode(run, config, plain, tmp_path, mode: str) -> None:
    done = run("decrypt", plain, tmp_path / "d.parquet", "--config", config, f"--mode={mode}")
    assert done.exit_code == 2 and "three octal digits" in " ".join(done.stderr.split())
    assert not (tmp_path / "d.parquet").exists()
