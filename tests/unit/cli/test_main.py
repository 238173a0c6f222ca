import errno
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from soak import SOAK
from typer.testing import CliRunner

from parquet_keytools import __version__, errors
from parquet_keytools.cli import EXIT_STATUS, CommandGroup, app
from parquet_keytools.cli.output import ExitStatus, status_of

PROGRAM = [sys.executable, "-c", "from parquet_keytools.cli import main; main()"]
KMS: dict[str, Any] = {"backend": "vault", "operation": "unwrap", "master_key_id": "pii"}
DENIED = errors.KmsAccessDeniedError(**KMS)


def test_help_imports_nothing_slow() -> None:
    check = (
        "import sys, parquet_keytools.cli as cli\n"
        "sys.argv = ['parquet-keytools', '--help']\n"
        "try: cli.main()\n"
        "except SystemExit as done: assert done.code == 0\n"
        "print([name for name in ('pyarrow', 'pydantic', 'cryptography', 'rich', 'yaml') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_python_without_docstrings_is_refused() -> None:
    """Otherwise, options would lose their names."""
    command = [sys.executable, "-OO", "-m", "parquet_keytools", "keys", "--help"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (2, "")
    assert "Run it without -OO." in process.stderr


def test_help_names_every_command_and_the_exit_statuses(run) -> None:
    done = run("--help")
    assert done.exit_code == 0
    for name in ("demo", "check", "encrypt", "decrypt", "rekey", "rotate", "keys", "hash-key", "keystore"):
        assert f"\n  {name} " in done.stdout
    for group in ([], ["keystore"], ["spark"]):
        assert "..." not in run(*group, "-h").stdout.split("Commands:")[1]


def test_each_help_text_and_the_readme_have_the_same_exit_statuses(run) -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    assert EXIT_STATUS in " ".join(readme.split())

    def check(command: Any, *path: str) -> int:
        assert " ".join(run(*path, "--help").stdout.split()).endswith(EXIT_STATUS), path
        below = getattr(command, "commands", {})
        return 1 + sum(check(found, *path, name) for name, found in below.items())

    assert check(typer.main.get_command(app)) > 30


FILE_OPTIONS = ["SRC", "DST", "--config", "--table", "--overwrite", "--json"]


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("demo", ["--folder"]),
        (
            "check",
            ["CONFIG", "--offline", "--against", "--table", "--aad-prefix", "--schema", "--json"],
        ),
        ("encrypt", FILE_OPTIONS),
        ("decrypt", [*FILE_OPTIONS, "--aad-prefix"]),
        (
            "rekey",
            [*FILE_OPTIONS, "--aad-prefix", "--to-config", "--to-table", "--in-place"],
        ),
        (
            "rotate",
            [
                "PATH",
                "--config",
                "--from",
                "--to",
                "--only-master-key",
                "--older-than",
                "--new-keks",
                *("--dry-run", "--aad-prefix", "--json"),
            ],
        ),
        (
            "keys",
            ["PATH", "--config", "--table", "--aad-prefix", "--fail-if-uses", "--ignore-skipped", "--json"],
        ),
        ("keystore", ["create-key"]),
    ],
)
def test_help_of_a_command_names_its_options(run, command: str, options: list[str]) -> None:
    done = run(command, "--help")
    assert done.exit_code == 0
    assert [option for option in options if option not in done.stdout] == []


def test_it_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "parquet_keytools", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"parquet-keytools {__version__}\n"


def test_the_environment_names_the_configuration(
    run, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, encrypted = tmp_path / "p.parquet", tmp_path / "e.parquet"
    pq.write_table(pa.table({"name": ["x"]}), plain)
    monkeypatch.setenv("PARQUET_KEYTOOLS_CONFIG", str(config))
    assert run("check", "--offline").exit_code == 0
    assert run("encrypt", plain, encrypted).exit_code == 0
    for command in ("inspect", "verify"):
        assert "not authenticated" not in run(command, encrypted).stdout
    assert run("keys", encrypted, "--fail-if-uses", "times").exit_code == 0
    # This also holds for a keystore; --path takes precedence.
    done = run("keystore", "list")
    assert done.exit_code == 2 and "is not a keystore" in done.stderr
    assert "there is no file" in run("keystore", "list", "--path", tmp_path / "none.json").stderr


def test_completion_of_the_shell() -> None:
    asked = {
        "_PARQUET_KEYTOOLS_COMPLETE": "complete_bash",
        "COMP_WORDS": "parquet-keytools ro",
        "COMP_CWORD": "1",
    }
    done = subprocess.run(
        [Path(sys.executable).with_name("parquet-keytools")],
        env=os.environ | asked,
        capture_output=True,
        text=True,
    )
    assert (done.stdout.split(), done.stderr) == (["rotate"], "")


def test_version(run) -> None:
    assert run("--version").stdout == f"parquet-keytools {__version__}\n"


@pytest.mark.parametrize("arguments", [["encrpt"], ["encrypt"], ["encrypt", "a", "b", "--confg", "c"], ["check"]])
def test_wrong_usage_is_2_and_told_on_stderr(run, arguments: list[str]) -> None:
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Error: " in done.stderr


def test_a_real_process_tells_an_error_in_one_text(program: list[str], tmp_path: Path) -> None:
    missing = tmp_path / "missing.yaml"
    done = subprocess.run([*program, "check", str(missing)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"Error: {missing}: there is no such file.\n"


def test_debug_shows_the_traceback(run, tmp_path: Path) -> None:
    done = run("--debug", "check", tmp_path / "missing.yaml")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Traceback" in done.stderr
    assert "ConfigurationError" in done.stderr


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.ConfigurationError("x"), 2),
        (errors.OutputError("x"), 2),
        (errors.ParquetFormatError("x"), 1),
        (errors.KeyMaterialError("x"), 1),
        (errors.NotEncryptedError("x"), 2),
        (errors.AlreadyEncryptedError("x"), 2),
        (errors.FormatLimitError("x"), 2),
        (errors.KeyNotAvailableError("x"), 2),
        (FileNotFoundError("x"), 2),
        (PermissionError("x"), 2),
        (errors.KmsConfigurationError(**KMS), 2),
        (DENIED, 3),
        (errors.KmsUnavailableError(**KMS), 3),
        (errors.MasterKeyNotFoundError(**KMS), 3),
        (errors.DecryptionError("x"), 1),
        (errors.FooterSignatureError("x"), 1),
        (errors.AadPrefixError("x"), 1),
        (errors.TableMismatchError("x", "t", []), 1),
        (errors.ColumnAccessDeniedError(["a"], [DENIED]), 3),
        (errors.ColumnAccessDeniedError(["a"], [errors.DecryptionError("x")]), 1),
        (errors.ColumnAccessDeniedError(["a", "b"], [errors.DecryptionError("x"), DENIED]), 3),
    ],
)
def test_exit_statuses(error: Exception, status: int) -> None:
    assert status_of(error) == status


def failing(error: BaseException) -> typer.Typer:
    program = typer.Typer(cls=CommandGroup, rich_markup_mode=None, pretty_exceptions_enable=False)

    @program.callback()
    def options() -> None: ...

    @program.command()
    def fail() -> None:
        typer.echo("some output")
        raise error

    return program


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (DENIED, f"Error: {DENIED}\n"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/data/x"), "Error: /data/x: No such file"),
        (OSError(errno.ENOSPC, "No space left on device"), "Error: No space left on device.\n"),
        (OSError("no room"), "Error: no room\n"),
        (OSError(), "Error: OSError\n"),
        (errors.OutputError("\x1b[2Kx\r\x9b1m\u202e", hint="a\nb"), "Error: \\x1b[2Kx\\r\\x9b1m\\u202e"),
    ],
)
def test_an_error_goes_to_stderr_without_a_traceback(error: Exception, text: str) -> None:
    done = CliRunner().invoke(failing(error), ["fail"])
    assert (done.exit_code, done.stdout) == (status_of(error), "some output\n")
    assert done.stderr.startswith(text)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), typer.Abort()])
def test_an_interruption_is_130_and_one_line(interruption: BaseException) -> None:
    done = CliRunner().invoke(failing(interruption), ["fail"])
    assert (done.exit_code, done.stderr) == (ExitStatus.INTERRUPTED, "Interrupted.\n")


def test_an_unforeseen_error_keeps_its_traceback() -> None:
    done = CliRunner().invoke(failing(RuntimeError("unforeseen")), ["fail"])
    assert isinstance(done.exception, RuntimeError)


def test_output_that_nobody_reads_ends_quietly(program: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as nobody:
        done = subprocess.run(
            [*program, "check", "--schema"],
            # Google's libraries warn about a Python version whose support will end soon.
            env=os.environ | {"PYTHONWARNINGS": "ignore::FutureWarning"},
            stdout=nobody,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (ExitStatus.NOBODY_READS, "")


@pytest.mark.parametrize(
    ("closed", "processes"),
    [*([(">&-", 1)] if SOAK else []), ("2>&-", 1), ("<&- >&- 2>&-", 2)],
)
def test_streams_may_be_closed(config: Path, table: pa.Table, tmp_path: Path, closed: str, processes: int) -> None:
    (tmp_path / "many").mkdir()
    for number in range(4):
        pq.write_table(table, tmp_path / "many" / f"{number}.parquet")
    command = [*PROGRAM, "encrypt", tmp_path / "many", tmp_path / "new", "--config", config]
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *map(str, command), "--processes", str(processes)]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list((tmp_path / "new").iterdir())) == 4


def test_warnings_are_one_line_each_on_stderr(run, config: Path) -> None:
    config.write_text(config.read_text() + "    algorithm: AES_GCM_CTR_V1\n")
    shown = warnings.showwarning
    done = run("check", config, "--offline")
    assert (done.exit_code, done.stdout) == (0, f"{config}: no mistakes. The KMS was not called.\n")
    (first,) = done.stderr.splitlines()
    assert first.startswith(f"Warning: {config}:10: tables.people.algorithm: page data is not authenticated")
    assert warnings.showwarning is shown
