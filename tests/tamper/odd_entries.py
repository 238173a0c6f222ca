"""Entries that may lie beside a good file in a folder, and how each command must treat them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

MakeFile = Callable[[Path], None]
"""Writes a good Parquet file of the data set."""


class Verdict(Enum):
    """How the walk must treat an entry."""

    BELONGS = "a file of the data set"
    DAMAGED = "a file of the data set that cannot be read: it fails under its name"
    LEFT_OUT = "no part of the data set"
    NOT_PARQUET = "no part of the data set, and no name that readers pass over: they warn"
    UNSEEN = "could not be checked: reported, exit status 1, readers fail"


@dataclass(frozen=True)
class Odd:
    """An entry.

    Attributes:
        make: Puts it into a folder; gets a second folder for the targets of links.
        verdict: The walk's verdict.
        names: Paths within the folder that are reported for it.
        rows: How many more files are read.
    """

    make: Callable[[Path, Path, MakeFile], None]
    verdict: Verdict
    names: tuple[str, ...]

    @property
    def files(self) -> int:
        return len(self.names) if self.verdict is Verdict.BELONGS else 0


def _file(name: str) -> Callable[[Path, Path, MakeFile], None]:
    def make(folder: Path, elsewhere: Path, good: MakeFile) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        good(folder / name)

    return make


def _bytes(name: str, content: bytes = b"") -> Callable[[Path, Path, MakeFile], None]:
    def make(folder: Path, elsewhere: Path, good: MakeFile) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)

    return make


def _link(name: str, target: str) -> Callable[[Path, Path, MakeFile], None]:
    def make(folder: Path, elsewhere: Path, good: MakeFile) -> None:
        (folder / name).symlink_to(target)

    return make


def _link_to_file(folder: Path, elsewhere: Path, good: MakeFile) -> None:
    good(elsewhere / "odd.parquet")
    (folder / "odd.parquet").symlink_to(elsewhere / "odd.parquet")


def _link_to_folder(folder: Path, elsewhere: Path, good: MakeFile) -> None:
    good(elsewhere / "odd.parquet")
    (folder / "linked").symlink_to(elsewhere)


def _twice(folder: Path, elsewhere: Path, good: MakeFile) -> None:
    (folder / "once").mkdir()
    good(folder / "once" / "odd.parquet")
    (folder / "again").symlink_to(folder / "once")


def _link_upwards(folder: Path, elsewhere: Path, good: MakeFile) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "up").symlink_to(folder)


def _pipe(name: str) -> Callable[[Path, Path, MakeFile], None]:
    return lambda folder, elsewhere, good: os.mkfifo(folder / name)


def _socket(folder: Path, elsewhere: Path, good: MakeFile) -> None:
    here = Path.cwd()
    os.chdir(folder)  # its path would be too long
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("socket")
    finally:
        os.chdir(here)


def _not_utf8(folder: Path, elsewhere: Path, good: MakeFile) -> None:
    good(elsewhere / "odd.parquet")
    (elsewhere / "odd.parquet").rename(folder / os.fsdecode(b"caf\xe9.parquet"))


def _folder_not_utf8(folder: Path, elsewhere: Path, good: MakeFile) -> None:
    (folder / os.fsdecode(b"caf\xe9=1")).mkdir()
    good(elsewhere / "odd.parquet")
    (elsewhere / "odd.parquet").rename(folder / os.fsdecode(b"caf\xe9=1") / "odd.parquet")


BELONGS, LEFT_OUT, UNSEEN = Verdict.BELONGS, Verdict.LEFT_OUT, Verdict.UNSEEN
LONG = "x" * 180 + ".parquet"
LONGEST = "x" * 247 + ".parquet"

ENTRIES: dict[str, Odd] = {
    # --- files of the data set ---
    "upper case": Odd(_file("ODD.PARQUET"), BELONGS, ("ODD.PARQUET",)),
    "no ending": Odd(_file("odd"), BELONGS, ("odd",)),
    "another ending": Odd(_file("odd.parquet.bak"), BELONGS, ("odd.parquet.bak",)),
    "new line": Odd(_file("od\nd.parquet"), BELONGS, ("od\nd.parquet",)),
    "percent": Odd(_file("odd%20%2F.parquet"), BELONGS, ("odd%20%2F.parquet",)),
    "spaces": Odd(_file(" odd = 1 .parquet"), BELONGS, (" odd = 1 .parquet",)),
    "other letters": Odd(_file("été-日本.parquet"), BELONGS, ("été-日本.parquet",)),
    "long": Odd(_file(LONG), BELONGS, (LONG,)),
    "too long for key material": Odd(_file(LONGEST), BELONGS, (LONGEST,)),
    "like a URI": Odd(_file("odd-10:30.parquet"), BELONGS, ("odd-10:30.parquet",)),
    "folder like a file": Odd(_file("odd.parquet/part-0.parquet"), BELONGS, ("odd.parquet/part-0.parquet",)),
    "file like a folder": Odd(_file("year=2013"), BELONGS, ("year=2013",)),
    "partition with underscore": Odd(_file("_y=1/odd.parquet"), BELONGS, ("_y=1/odd.parquet",)),
    "link to a file": Odd(_link_to_file, BELONGS, ("odd.parquet",)),
    "link to a folder": Odd(_link_to_folder, BELONGS, ("linked/odd.parquet",)),
    "one file twice": Odd(_twice, BELONGS, ("again/odd.parquet", "once/odd.parquet")),
    # --- files that fail ---
    "empty Parquet file": Odd(_bytes("odd.parquet"), Verdict.DAMAGED, ("odd.parquet",)),
    "empty part": Odd(_bytes("part-00001"), Verdict.DAMAGED, ("part-00001",)),
    "begins as Parquet": Odd(_bytes("odd", b"PAR1 and no more"), Verdict.DAMAGED, ("odd",)),
    # --- not part of the data set ---
    "success": Odd(_bytes("_SUCCESS"), LEFT_OUT, ("_SUCCESS",)),
    "checksum": Odd(_bytes(".odd.parquet.crc", b"crc"), LEFT_OUT, (".odd.parquet.crc",)),
    "hidden file": Odd(_file(".odd.parquet"), LEFT_OUT, (".odd.parquet",)),
    "underscore": Odd(_file("_odd.parquet"), LEFT_OUT, ("_odd.parquet",)),
    "hidden folder": Odd(_file("_delta_log/1.parquet"), LEFT_OUT, ("_delta_log/1.parquet", "_delta_log")),
    "summary": Odd(_file("_metadata"), LEFT_OUT, ("_metadata",)),
    "key material": Odd(
        _bytes("_KEY_MATERIAL_FOR_gone=1.json", b"{}"), LEFT_OUT, ("_KEY_MATERIAL_FOR_gone=1.json",)
    ),
    "hidden dangling link": Odd(_link("_odd.parquet", "/nowhere"), LEFT_OUT, ("_odd.parquet",)),
    "hidden pipe": Odd(_pipe(".odd.parquet"), LEFT_OUT, (".odd.parquet",)),
    "empty folder": Odd(
        lambda folder, elsewhere, good: (folder / "empty.parquet").mkdir(), LEFT_OUT, ("empty.parquet",)
    ),
    # --- not part of the data set, and readers warn ---
    "notes": Odd(_bytes("notes.txt", b"some notes"), Verdict.NOT_PARQUET, ("notes.txt",)),
    "empty file": Odd(_bytes("odd"), Verdict.NOT_PARQUET, ("odd",)),
    "Iceberg": Odd(_bytes("metadata/v1.json", b"{}"), Verdict.NOT_PARQUET, ("metadata/v1.json",)),
    # --- unreadable ---
    "dangling link": Odd(_link("odd.parquet", "/nowhere/odd.parquet"), UNSEEN, ("odd.parquet",)),
    "dangling link without an ending": Odd(_link("odd", "/nowhere/odd"), UNSEEN, ("odd",)),
    "dangling link to a partition": Odd(_link("year=2013", "/nowhere"), UNSEEN, ("year=2013",)),
    "link to itself": Odd(_link("odd.parquet", "odd.parquet"), UNSEEN, ("odd.parquet",)),
    "link to a folder above": Odd(_link_upwards, UNSEEN, ("sub/up",)),
    "pipe": Odd(_pipe("odd.parquet"), UNSEEN, ("odd.parquet",)),
    "pipe without an ending": Odd(_pipe("odd"), UNSEEN, ("odd",)),
    "socket": Odd(_socket, UNSEEN, ("socket",)),
    "device": Odd(_link("odd.parquet", "/dev/null"), UNSEEN, ("odd.parquet",)),
    "name that is not UTF-8": Odd(_not_utf8, UNSEEN, ("caf\\xe9.parquet",)),
    "folder that is not UTF-8": Odd(_folder_not_utf8, UNSEEN, ("caf\\xe9=1",)),
}
