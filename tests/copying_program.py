"""A program that copies a folder with two processes; a file's name says what happens to it."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import typer

from parquet_keytools.cli import CommandGroup
from parquet_keytools.cli.file_work import convert_files
from parquet_keytools.errors import NotEncryptedError
from parquet_keytools.files.conversion import FileResult

PIDS = "process ids"
"""A folder of files with the ids of the processes that copied."""


def copied(source: str, target: str, **options: Any) -> FileResult:
    """Stands in for a conversion: the file's name says what happens to it."""
    name = Path(source).stem
    Path(target).parents[1].with_name(PIDS).joinpath(str(os.getpid())).touch()
    if name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "refused":
        raise NotEncryptedError(f"{source} is not encrypted.")
    if name == "full":
        raise OSError(errno.ENOSPC, "no space left on device")
    if name.startswith("slow"):
        Path(target).with_name(f"{name}.begun").touch()
        time.sleep(300 if name.startswith("slowest") else 1.5)
    shutil.copyfile(source, target)
    return FileResult(source, target, 1, 1)


def main() -> None:
    """Copy the folder that the first argument names to the second one."""
    app = typer.Typer(cls=CommandGroup)
    app.callback()(lambda: None)

    @app.command("copy")
    def copy_command(source: str, target: str) -> None:
        convert_files([source], target, "copied", copied, overwrite=False, processes=2)

    app(["copy", *sys.argv[1:]])
