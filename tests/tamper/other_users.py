"""Another user of the machine who may write to a folder, and attacks at the worst moment of a command."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from crash_writers import SECRET

VICTIM, ATTACKER = 4242, 4343
"""Numbers of users."""

PRIVATE = "private"
"""The victim's folder beside the data set, with the same file names."""


def _files(folder: Path) -> Iterator[Path]:
    for place, _, found in os.walk(folder):
        for name in found:
            yield Path(place, name)


def _replace(path: Path, make: Callable[[], object]) -> None:
    """Replace or create a file; if that is not permitted, do nothing."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        make()


def _link_hidden(folder: Path, private: Path) -> None:
    """Replace temporary files and locks by links."""
    for path in _files(folder):
        if path.name.startswith("."):
            _replace(path, lambda path=path: path.symlink_to(private / "secret"))  # type: ignore[misc]


def _own_hidden(folder: Path, private: Path) -> None:
    """Replace temporary files by files that anyone may read and write."""
    for path in _files(folder):
        if path.name.startswith("."):
            _replace(path, lambda path=path: (path.write_bytes(b"PAR1"), path.chmod(0o666)))  # type: ignore[misc]


def _link_visible(folder: Path, private: Path) -> None:
    """Replace Parquet files and key material by links."""
    for path in _files(folder):
        if not path.name.startswith("."):
            _replace(path, lambda path=path: path.symlink_to(private / "secret"))  # type: ignore[misc]


def _link_elsewhere(folder: Path, private: Path) -> None:
    """Replace a folder by a link to a folder with the same file names."""
    for inner in (entry for entry in folder.iterdir() if entry.is_dir()):
        with contextlib.suppress(OSError):
            inner.rename(inner.with_name("moved"))
            inner.symlink_to(private / inner.name)


def _plant_locks(folder: Path, private: Path) -> None:
    """Put links and pipes where locks will be."""
    for place in {path.parent for path in _files(folder)} | {folder}:
        names = [".parquet-keytools.lock", *(f".parquet-keytools.{user}.lock" for user in (0, VICTIM))]
        for number, name in enumerate(names):
            path = place / name
            make = os.mkfifo if number % 2 else (lambda path: Path(path).symlink_to(private / "secret"))
            _replace(path, lambda path=path, make=make: make(path))  # type: ignore[misc]


def _plant_state(folder: Path, private: Path) -> None:
    """Put links where key material may be looked up."""
    for path in list(_files(folder)):
        if path.name.endswith(".parquet"):
            other = path.with_name(f"_KEY_MATERIAL_FOR_{path.name}.json")
            if not other.exists():
                with contextlib.suppress(OSError):
                    other.symlink_to(private / "secret")


ATTACKS: dict[str, Callable[[Path, Path], None]] = {
    "link hidden": _link_hidden,
    "own hidden": _own_hidden,
    "link visible": _link_visible,
    "link elsewhere": _link_elsewhere,
    "plant locks": _plant_locks,
    "plant state": _plant_state,
}


def sees_values(folder: Path) -> bool:
    """Return whether this user can read a value in plaintext."""
    for path in _files(folder):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                if SECRET in os.read(file, 1 << 20):
                    return True
            finally:
                os.close(file)
    return False


class Attacker:
    """A process of another user that attacks on request.

    Args:
        attack: One of ATTACKS.
        folder: Where this user may write.
        private: A folder that only the victim may use.
    """

    def __init__(self, attack: str, folder: Path, private: Path) -> None:
        from_asked, self._asked = os.pipe()
        self._answers, to_answers = os.pipe()
        self.saw_values = False
        if os.fork() == 0:
            os.close(self._asked)
            os.setgroups([])
            os.setgid(ATTACKER)
            os.setuid(ATTACKER)
            os.umask(0)
            while request := os.read(from_asked, 1):
                if request == b"a":
                    with contextlib.suppress(OSError):
                        ATTACKS[attack](folder, private)
                os.write(to_answers, b"1" if sees_values(folder) else b"0")
            os._exit(0)
        os.close(from_asked)
        os.close(to_answers)

    def attack(self) -> None:
        """Start the attack, and look for values."""
        self._ask(b"a")

    def look(self) -> None:
        """Look for values."""
        self._ask(b"l")

    def _ask(self, request: bytes) -> None:
        os.write(self._asked, request)
        self.saw_values |= os.read(self._answers, 1) == b"1"
