"""Python as on macOS or Windows, as far as Linux can imitate them; and the main jobs, run there.

This is a program: `python other_systems.py FOLDER darwin win32`. It forks for each system, removes what Python
lacks there, and does the jobs. Typeshed, which comes with mypy, says which names are missing.

Other packages and the standard library have their own builds for each system and are not under test: they are
imported as on Linux, before `sys.platform` changes. `os.name` stays, since otherwise `pathlib` and `os.path`
would make paths that this kernel cannot open: drives and backslashes are not simulated.

For macOS, names are removed from the modules themselves. For Windows, the standard library would then fail on this
kernel. So only this package gets changed modules, without those names and with Windows' restrictions: folders by
descriptor, text mode where O_BINARY is missing, the renaming and removal of open files, and `os.kill`.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import errno
import importlib
import json
import os
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGES = (
    "azure.identity",
    "boto3",
    "cryptography.hazmat.primitives.ciphers.aead",
    "cryptography.hazmat.primitives.kdf.scrypt",
    "filelock",
    "fsspec.implementations.local",
    "google.cloud.kms_v1",
    "opentelemetry.metrics",
    "opentelemetry.trace",
    "pandas",
    "pyarrow.dataset",
    "pyarrow.parquet.encryption",
    "pydantic",
    "pyiceberg.catalog.rest",
    "pyiceberg.io.pyarrow",
    "rich.console",
    "rich.markdown",
    "rich.progress",
    "rich.table",
    "ruamel.yaml",
    "typer.rich_utils",
    "typer.testing",
    "yaml",
    # Standard library modules that check the system when they are imported.
    "asyncio",
    "ctypes.util",
    "getpass",
    "http.server",
    "multiprocessing.connection",
    "multiprocessing.resource_tracker",
    "shutil",
    "ssl",
    "subprocess",
    "tempfile",
    "urllib.request",
)


@cache
def stub_of(module: str) -> list[ast.stmt] | None:
    """Return what typeshed says about a standard library module; None if that is the same for all systems."""
    import mypy

    stubs = Path(mypy.__file__).parent / "typeshed" / "stdlib" / Path(*module.split("."))
    file = next((file for file in (stubs.with_suffix(".pyi"), stubs / "__init__.pyi") if file.exists()), None)
    text = file.read_text() if file is not None else ""
    return ast.parse(text).body if "sys.platform" in text else None


@cache
def names_in(module: str, platform: str) -> frozenset[str] | None:
    """Return the names of a standard library module on a system; None if all systems have the same."""
    stub = stub_of(module)
    if stub is None:
        return None
    names: set[str] = set()
    system = types.SimpleNamespace(platform=platform, version_info=sys.version_info, maxsize=sys.maxsize)

    def visit(statements: list[ast.stmt]) -> None:
        for statement in statements:
            match statement:
                case ast.If():
                    holds = eval(
                        compile(ast.Expression(statement.test), module, "eval"),
                        {"sys": system, "TYPE_CHECKING": True},
                    )
                    visit(statement.body if holds else statement.orelse)
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    names.add(statement.name)
                case ast.AnnAssign(target=ast.Name(id=name)):
                    names.add(name)
                case ast.Assign():
                    names.update(target.id for target in statement.targets if isinstance(target, ast.Name))
                case ast.ImportFrom():
                    # A stub re-exports only these.
                    names.update(alias.name for alias in statement.names if alias.name in (alias.asname, "*"))

    visit(stub)
    return frozenset(names)


@cache
def lacking(module: str, platform: str) -> frozenset[str]:
    """Return the names that a module has on Linux, and not on another system."""
    here, there = names_in(module, "linux"), names_in(module, platform)
    if here is None or there is None or "*" in here:
        return frozenset()
    return here - there


def is_missing(module: str, platform: str) -> bool:
    """Return whether a module is missing on a system."""
    here, there = (
        {name for name in names_in(module, system) or () if not name.startswith("_")}
        for system in ("linux", platform)
    )
    return bool(here) and not there


def import_packages() -> None:
    """Import everything but this package, as on Linux; packages that are not installed are not needed."""
    import remembered_scrypt

    remembered_scrypt.install()
    for name in PACKAGES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    import typer.testing

    # Typer builds the whole tree of commands for each call of one.
    typer.testing._get_command = cache(typer.testing._get_command)


def become_macos() -> None:
    """Remove what Python lacks on macOS, for all later imports."""
    import ctypes
    import fcntl

    real_fcntl = fcntl.fcntl
    for name in sys.stdlib_module_names:
        if name in ("sys", "builtins") or not lacking(name, "darwin"):
            continue
        with contextlib.suppress(ImportError):
            module = importlib.import_module(name)
            for lost in lacking(name, "darwin"):
                vars(module).pop(lost, None)

    class Library(ctypes.CDLL):
        def __getattr__(self, name: str) -> Any:
            if name in ("renameat2", "memfd_create", "copy_file_range", "statx"):
                raise AttributeError(name)
            return super().__getattr__(name)

    def control(descriptor: int, command: int, *rest: Any) -> Any:
        if command == 51:
            return os.fsync(descriptor)
        return real_fcntl(descriptor, command, *rest)

    ctypes.CDLL = Library  # type: ignore[misc]
    fcntl.F_FULLFSYNC = 51
    fcntl.fcntl = control  # type: ignore[assignment]
    without_proc()
    sys.platform = "darwin"


def without_proc() -> None:
    """Hide /proc and /sys, which only Linux has."""

    def hides(path: Any) -> bool:
        return isinstance(path, (str, os.PathLike)) and str(path).startswith(("/proc", "/sys/"))

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and hides(arguments[0]):
            raise FileNotFoundError(errno.ENOENT, "hidden", str(arguments[0]))

    def hiding(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(path: Any, *rest: Any, **named: Any) -> Any:
            if hides(path):
                raise FileNotFoundError(errno.ENOENT, "hidden", str(path))
            return call(path, *rest, **named)

        return wrapper

    for name in ("stat", "lstat", "link", "readlink"):
        setattr(os, name, hiding(getattr(os, name)))
    sys.addaudithook(refuse)


# --- Windows ---


O_BINARY, O_NOINHERIT = 0x8000, 0x0080
"""Constants of Windows; here they have other meanings, and are removed."""


class Windows:
    """The operations that Windows refuses.

    Args:
        root: The folder in which open files can be neither renamed nor removed.
    """

    def __init__(self, root: str) -> None:
        import fcntl

        self._root = root
        self._flags_of = lambda descriptor: fcntl.fcntl(descriptor, fcntl.F_GETFL)
        self._readlink, self._listdir, self._lstat = os.readlink, os.listdir, os.lstat
        self.modules: dict[str, types.ModuleType] = {}

    def begin(self) -> None:
        """Apply the restrictions to this package."""
        for name in sys.stdlib_module_names:
            if is_missing(name, "win32"):
                sys.modules[name] = None  # type: ignore[assignment]
        # pathlib looks these up in the module.
        for name in ("rename", "replace", "unlink", "remove", "rmdir"):
            setattr(os, name, self._refusing_open_files(name, getattr(os, name)))
        for name in ("stat", "lstat", "fstat"):
            setattr(os, name, self._without_owner(getattr(os, name)))
        os.fork = _refused("this system does not fork")
        without_proc()
        sys.platform = "win32"
        real_import = builtins.__import__

        def importing(
            name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
        ) -> types.ModuleType:
            module = real_import(name, globals, locals, fromlist, level)
            importer = (globals or {}).get("__name__", "")
            if level == 0 and importer.partition(".")[0] == "parquet_keytools" and lacking(name, "win32"):
                return self._module(name)
            return module

        builtins.__import__ = importing

    def _module(self, name: str) -> types.ModuleType:
        if name not in self.modules:
            real = importlib.import_module(name)
            lost = lacking(name, "win32")
            kept = {key: value for key, value in vars(real).items() if key not in lost}
            module = self.modules[name] = types.ModuleType(name)
            vars(module).update(kept)
            if name == "os":
                self._change_os(module)
        return self.modules[name]

    def _change_os(self, module: Any) -> None:
        module.O_BINARY, module.O_NOINHERIT = O_BINARY, O_NOINHERIT
        module.supports_dir_fd = module.supports_fd = set()
        module.supports_follow_symlinks = {module.stat}
        module.open = self._open
        module.fsync = self._fsync
        module.kill = _refused("this would end the process")
        for name in ("listdir", "scandir"):
            setattr(module, name, self._by_path(getattr(module, name)))
        for name in (
            "link",
            "mkdir",
            "readlink",
            "rename",
            "replace",
            "rmdir",
            "stat",
            "unlink",
            "remove",
            "utime",
        ):
            setattr(module, name, self._without_folders(name, getattr(module, name)))

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is not None:
            raise NotImplementedError("dir_fd unavailable on this platform")
        if not flags & O_BINARY:
            raise AssertionError(f"{path} would be opened as text, whose line ends are changed")
        if Path(path).is_dir():
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return os.open(path, flags & ~(O_BINARY | O_NOINHERIT), mode)

    def _fsync(self, descriptor: int) -> None:
        if self._flags_of(descriptor) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        os.fsync(descriptor)

    def _refusing_open_files(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*paths: Any, **named: Any) -> Any:
            for path in map(os.fspath, paths):
                if isinstance(path, str) and os.path.realpath(path).startswith(self._root):
                    self._refuse_open(path)
            if name == "rename" and len(paths) > 1 and os.path.lexists(paths[1]):
                raise FileExistsError(errno.EEXIST, "exists", paths[1])
            return call(*paths, **named)

        return wrapper

    def _refuse_open(self, path: str) -> None:
        here = f"{os.path.realpath(Path(path).parent)}/{Path(path).name}"
        for descriptor in self._listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                if self._readlink(f"/proc/self/fd/{descriptor}") == here:
                    raise PermissionError(errno.EACCES, "it is open", path)

    def _without_owner(self, call: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def wrapper(*arguments: Any, **named: Any) -> os.stat_result:
            found = call(*arguments, **named)
            is_folder = found.st_mode & 0o170000 == 0o040000
            mode = found.st_mode & ~0o777 | (0o777 if is_folder else 0o666 if found.st_mode & 0o200 else 0o444)
            known = {name: getattr(found, name) for name in dir(found) if name.startswith("st_")}
            return os.stat_result((mode, *found[1:4], 0, 0, *found[6:10]), known)

        return wrapper

    @staticmethod
    def _by_path(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(path: Any = ".") -> Any:
            if isinstance(path, int):
                raise TypeError("a path is wanted, not a file descriptor")
            return call(path)

        return wrapper

    @staticmethod
    def _without_folders(function: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **named: Any) -> Any:
            for name in ("dir_fd", "src_dir_fd", "dst_dir_fd"):
                if named.pop(name, None) is not None:
                    raise NotImplementedError(f"{function}: {name} unavailable on this platform")
            if function != "stat" and not named.get("follow_symlinks", True):
                raise NotImplementedError(f"{function}: follow_symlinks unavailable on this platform")
            return call(*arguments, **named)

        return wrapper


def _refused(why: str) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise AssertionError(why)

    return call


# --- the jobs ---


class Jobs:
    """What people do with this package, one job after the other, in one folder."""

    def __init__(self, folder: Path) -> None:
        import pyarrow as pa

        self.folder = folder
        self.configuration = folder / "keytools.yaml"
        self.file = folder / "encrypted.parquet"
        self.table = pa.table({"a": list(range(1000)), "b": [f"text {i % 17}" for i in range(1000)]})
        passphrase = folder / "passphrase"
        passphrase.write_text("correct horse battery staple\n")
        passphrase.chmod(0o600)
        table = "{footer_key: kf, column_keys: {ka: [a]}, unlisted_columns: plaintext"
        self.configuration.write_text(
            "version: 1\n"
            f"kms: {{type: keystore, path: {folder}/keystore.json, passphrase_file: {passphrase}}}\n"
            f"tables: {{t: {table}}}, external: {table}, key_material: external}}}}\n"
        )

    def run(self, *arguments: Any, status: int = 0) -> str:
        """Run a command."""
        from typer.testing import CliRunner

        from parquet_keytools.cli import app

        done = CliRunner().invoke(app, list(map(str, arguments)))
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == status, f"{arguments} ended with {done.exit_code}: {done.output}"
        return str(done.output)

    @contextlib.contextmanager
    def tools(self) -> Iterator[Any]:
        """Return the facade."""
        from parquet_keytools import Keytools

        with Keytools.from_yaml(self.configuration) as keytools:
            yield keytools

    def options(self, table: str = "t") -> list[Any]:
        """Return the options that commands need."""
        return ["--config", self.configuration, "--table", table]

    def reads(self, path: Path, table: str = "t") -> bool:
        """Return whether a file or folder contains the values."""
        with self.tools() as keytools:
            return bool(keytools.read_table(path, table_name=table).equals(self.table))

    # Each method is a job; they run in this order.

    def imports(self) -> None:
        """Every source file can be imported, if its extras are installed."""
        import pkgutil

        import parquet_keytools

        for found in pkgutil.walk_packages(parquet_keytools.__path__, "parquet_keytools."):
            if not found.name.endswith("__main__"):
                try:
                    importlib.import_module(found.name)
                except ImportError as error:
                    if (error.name or "parquet_keytools").partition(".")[0] in (
                        "parquet_keytools",
                        "fcntl",
                        "pwd",
                    ):
                        raise

    def keystore(self) -> None:
        """The command line creates and rotates keys."""
        from parquet_keytools.kms.keystore_file import Keystore

        # Its speed is not under test.
        Keystore.create.__func__.__kwdefaults__["scrypt_n"] = 2**14  # type: ignore[attr-defined]
        where = ["--path", self.folder / "keystore.json", "--passphrase-file", self.folder / "passphrase"]
        for name in ("kf", "ka", "other"):
            self.run("keystore", "create-key", name, *where)
        self.run("keystore", "rotate-key", "ka", *where)
        listed = self.run("keystore", "list", *where)
        assert "kf" in listed and "ka" in listed
        self.run("keystore", "disable", "other", *where)
        self.run("keystore", "enable", "other", *where)

    def keystore_of_several_writers(self) -> None:
        """Threads that change one keystore wait for each other."""
        from concurrent.futures import ThreadPoolExecutor

        from parquet_keytools.kms.keystore_file import Keystore
        from parquet_keytools.kms.passphrase import passphrase_from_file

        path = self.folder / "shared.json"
        Keystore.create(path, lambda: passphrase_from_file(self.folder / "passphrase"), scrypt_n=2**14)
        names = [f"key-{number}" for number in range(8)]

        def create(name: str) -> None:
            Keystore(path, lambda: passphrase_from_file(self.folder / "passphrase")).create_key(name)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(create, names))
        keystore = Keystore(path, lambda: passphrase_from_file(self.folder / "passphrase"))
        assert keystore.master_key_ids() == set(names)

    def write_and_read(self) -> None:
        """The main job, with key material in the file and beside it, as a new file and over another file."""
        from parquet_keytools.errors import KeytoolsError

        for table in ("t", "external"):
            path = self.file if table == "t" else self.folder / "external.parquet"
            with self.tools() as keytools:
                for _ in range(2):
                    keytools.write_table(self.table, path, table_name=table)
                assert keytools.read_table(path, table_name=table).equals(self.table)
                with keytools.writer(path, self.table.schema, table_name=table) as writer:
                    writer.write_table(self.table)
            assert self.reads(path, table)
        with self.tools() as keytools:
            try:
                keytools.encrypt_file(self.file, self.file, table_name="t")
            except KeytoolsError:
                return
        raise AssertionError("a file was encrypted twice")

    def data_sets(self) -> None:
        """Folders, written twice."""
        with self.tools() as keytools:
            for _ in range(2):
                keytools.write_dataset(
                    self.table, self.folder / "set", table_name="t", existing_data_behavior="delete_matching"
                )
            assert keytools.dataset(self.folder / "set", table_name="t").to_table().equals(self.table)

    def encrypt(self) -> None:
        """Files and folders by the command line; several processes where the system supports them."""
        import pyarrow.parquet as pq

        plain = self.folder / "plain"
        plain.mkdir()
        for number in range(3):
            pq.write_table(self.table, plain / f"{number}.parquet")
        for target in ("one.parquet", "external_one.parquet"):
            table = "external" if target.startswith("external") else "t"
            self.run("encrypt", plain / "0.parquet", self.folder / target, *self.options(table))
            self.run("encrypt", plain / "0.parquet", self.folder / target, *self.options(table), status=2)
            self.run("encrypt", plain / "0.parquet", self.folder / target, *self.options(table), "--overwrite")
            assert self.reads(self.folder / target, table)
        self.run("encrypt", plain, self.folder / "many", *self.options(), "--processes", 2)
        assert self.reads(self.folder / "many" / "2.parquet")

    def decrypt(self) -> None:
        """The decrypted data is the same."""
        import pyarrow.parquet as pq

        self.run("decrypt", self.folder / "many", self.folder / "back", *self.options())
        assert pq.read_table(self.folder / "back" / "1.parquet").equals(self.table)
        self.run("decrypt", self.folder / "one.parquet", self.folder / "one_back.parquet", *self.options())
        assert pq.read_table(self.folder / "one_back.parquet").equals(self.table)

    def verify(self) -> None:
        """Intact files conform, and damaged files do not."""
        for path in ("one.parquet", "many", "set"):
            self.run("verify", self.folder / path, *self.options())
        self.run("verify", self.folder / "external_one.parquet", *self.options("external"))
        self.run("inspect", self.folder / "one.parquet")
        damaged = bytearray((self.folder / "one.parquet").read_bytes())
        damaged[100] ^= 1
        (self.folder / "damaged.parquet").write_bytes(damaged)
        self.run("verify", self.folder / "damaged.parquet", *self.options(), status=1)

    def salvage(self) -> None:
        """The intact parts of a damaged file are decrypted."""
        import pyarrow.parquet as pq

        path, target = self.folder / "groups.parquet", self.folder / "salvaged.parquet"
        with self.tools() as keytools:
            keytools.write_table(self.table, path, table_name="t", row_group_size=500)
        damaged = bytearray(path.read_bytes())
        damaged[60] ^= 1
        path.write_bytes(damaged)
        self.run("decrypt", path, target, *self.options(), "--salvage", status=1)
        assert pq.read_table(target).equals(self.table.slice(500))

    def rekey(self) -> None:
        """New data keys, in another file and in place."""
        self.run("rekey", self.folder / "one.parquet", self.folder / "rekeyed.parquet", *self.options())
        assert self.reads(self.folder / "rekeyed.parquet")
        for path, table in (("many", "t"), ("external_one.parquet", "external")):
            self.run("rekey", self.folder / path, "--in-place", *self.options(table))
        assert self.reads(self.folder / "many" / "0.parquet")
        assert self.reads(self.folder / "external_one.parquet", "external")

    def rotate(self) -> None:
        """New master keys, with keys of old versions, and new KEKs."""
        where = ["--path", self.folder / "keystore.json", "--passphrase-file", self.folder / "passphrase"]
        for path, table in (("many", "t"), ("external_one.parquet", "external")):
            self.run("keystore", "rotate-key", "ka", *where)
            self.run("rotate", self.folder / path, *self.options(table))
            self.run("rotate", self.folder / path, *self.options(table), "--new-keks")
            self.run("rotate", self.folder / path, *self.options(table), "--from", "ka", "--to", "other")
            self.run("keys", self.folder / path, *self.options(table), "--fail-if-uses", "ka")
            self.run("rotate", self.folder / path, *self.options(table), "--from", "other", "--to", "ka")
        assert self.reads(self.folder / "external_one.parquet", "external")
        assert self.reads(self.folder / "many" / "0.parquet")

    def view(self) -> None:
        """Read as plain Parquet, by fsspec and pyarrow; writes there are encrypted."""
        import pyarrow.dataset as ds
        import pyarrow.parquet as pq

        with self.tools() as keytools:
            files = keytools.filesystem("t")
            with files.open(str(self.folder / "many" / "0.parquet"), "rb") as file:
                assert pq.read_table(file).equals(self.table)
            with files.open(str(self.folder / "by_view.parquet"), "wb") as file:
                pq.write_table(self.table, file)
            files.mv(str(self.folder / "by_view.parquet"), str(self.folder / "moved.parquet"))
            assert keytools.read_table(self.folder / "moved.parquet", table_name="t").equals(self.table)
            files.rm(str(self.folder / "moved.parquet"))
            seen = keytools.view(self.folder / "many", table_name="t")
            found = ds.dataset("", filesystem=seen.arrow, format="parquet").to_table()
            assert found.num_rows == 3 * self.table.num_rows

    def demo(self) -> None:
        """All steps of the demo, with a few of its rows."""
        from parquet_keytools import demo

        read_flights = demo.read_flights
        demo.read_flights = lambda: read_flights().slice(0, 10_000)
        assert "all 19 columns are still read" in self.run("demo", "--folder", self.folder / "demo")

    def leftovers(self) -> None:
        """The next write to a folder removes the leftovers of a killed process, once they are old enough."""
        from parquet_keytools.storage.local_files import temporary_name

        left = self.folder / "many" / temporary_name("x.parquet", is_locked=False)
        left.write_bytes(b"half")
        (self.folder / "many" / ".parquet-keytools.lock").touch()
        long_ago = time.time() - 7 * 24 * 3600
        os.utime(left, (long_ago, long_ago))
        with self.tools() as keytools:
            keytools.write_table(self.table, self.folder / "many" / "3.parquet", table_name="t")
        assert not left.exists()

    def nothing_is_left(self) -> None:
        """No temporary files and no locks, except the locks of keystores."""
        hidden = {path.name for path in self.folder.rglob(".*")} - {".keystore.json.lock", ".shared.json.lock"}
        # On Windows, filelock removes them; its replacement here does not.
        assert hidden <= ({".parquet-keytools.lock"} if sys.platform == "win32" else set()), hidden
        assert not list((self.folder / "home").rglob("*.jsonl"))


JOBS = [name for name, job in vars(Jobs).items() if callable(job) and not name.startswith("_")]
JOBS = [name for name in JOBS if name not in ("run", "tools", "options", "reads")]


def main() -> None:
    """Import packages once, and do the jobs in a process for each system."""
    folder, *platforms = sys.argv[1:]
    assert find_spec("mypy") is not None
    import_packages()
    for name in sys.stdlib_module_names:
        stub_of(name)
    for platform in platforms:
        # Nothing needs to be imitated on the system itself, which may be unable to fork.
        child = 0 if platform == sys.platform else os.fork()
        if child == 0:
            do_jobs(platform, Path(folder).resolve() / platform)
            return
        assert os.waitpid(child, 0)[1] == 0, platform


def do_jobs(platform: str, folder: Path) -> None:
    """Do the jobs in a new folder, and write the traceback of each, or nothing, to `jobs.json` there."""
    folder.mkdir()
    os.environ["HOME"] = str(folder / "home")
    if platform == sys.platform:
        pass
    elif platform == "darwin":
        become_macos()
    else:
        Windows(str(folder)).begin()
    jobs = Jobs(folder)
    ended = {}
    for name in JOBS:
        try:
            getattr(jobs, name)()
            ended[name] = ""
        except BaseException:
            ended[name] = traceback.format_exc()
    (folder / "jobs.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    main()
