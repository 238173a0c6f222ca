"""Names of temporary files, which say who writes there: the next run removes those of processes that are gone.

A name holds the machine (and container) of its process, the process's id and when it began. So another process of
the same machine knows whether it is still there, also on stores that have no locks. Of other machines only time
tells.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

DEAD_AFTER_SECONDS = 24 * 3600.0
"""How long a process of another machine may be at work on one file."""

_MOST_BYTES_OF_NAME = 140
_NAME = re.compile(
    r"\..+\.[0-9a-f]{12}-(?P<machine>[0-9a-f]{8})-(?P<process>[0-9a-f]+)-(?P<began>[0-9a-f]+)"
    r"\.(?:tmp|(?P<new>[0-9a-f]+)-(?P<old>[0-9a-f]+)-(?P<old_time>[0-9a-f]+)\.swap)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Swap:
    """Two files that exchange their names: which is which.

    Attributes:
        new: Inode of the new file.
        old: Inode of the one that it replaces.
        old_time: When that was changed last, in ns.
    """

    new: int
    old: int
    old_time: int


@dataclass(frozen=True)
class TemporaryName:
    """What the name of a temporary file says.

    Attributes:
        target: Name of the file that it will be; of long names a digest.
        machine: Where it is written.
        process_id: By whom.
        began: When that process began.
        swap: What exchanges its name with the target; None where nothing does.
    """

    target: str
    machine: str
    process_id: int
    began: int
    swap: Swap | None

    def is_dead(self, age_seconds: float) -> bool:
        """Return whether nobody writes there any more."""
        if self.machine != _machine():
            return age_seconds > DEAD_AFTER_SECONDS
        return not _is_alive(self.process_id, self.began)


def temporary_name(target: str, swap: Swap | None = None) -> str:
    """Return a new name for a temporary file beside a target.

    It starts with a dot: Arrow's and Spark's data sets pass over it.
    """
    process_id = os.getpid()
    writer = f"{secrets.token_hex(6)}-{_machine()}-{process_id:x}-{_began(process_id):x}"
    end = "tmp" if swap is None else f"{swap.new:x}-{swap.old:x}-{swap.old_time:x}.swap"
    return f"{beginning_of_names(target)}{writer}.{end}"


def beginning_of_names(target: str) -> str:
    """Return how the names of all temporary files of a target begin."""
    encoded = os.fsencode(target)
    # The operating system takes 255 bytes.
    stem = target if len(encoded) <= _MOST_BYTES_OF_NAME else hashlib.sha256(encoded).hexdigest()
    return f".{stem}."


def parse_temporary_name(name: str) -> TemporaryName | None:
    """Return what a name says, or None where it is no temporary file of ours."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    swap = None
    if found["new"] is not None:
        swap = Swap(int(found["new"], 16), int(found["old"], 16), int(found["old_time"], 16))
    target = name[1:].rsplit(".", 2 if swap is None else 3)[0]
    return TemporaryName(target, found["machine"], int(found["process"], 16), int(found["began"], 16), swap)


@lru_cache(maxsize=1)
def _machine() -> str:
    """Return a digest of what two processes have in common that see each other's ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        boot, namespace = socket.gethostname(), ""
    return hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:8]


def _is_alive(process_id: int, began: int) -> bool:
    try:
        os.kill(process_id, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return _began(process_id) in (began, 0)


def _began(process_id: int) -> int:
    """Return when a process began, in ticks; 0 where that is not known, and -1 where it ended."""
    try:
        text = Path(f"/proc/{process_id}/stat").read_bytes()
    except OSError:
        return 0
    # The name of the program comes in brackets, and may hold any.
    state, *others = text.rpartition(b")")[2].split()
    return -1 if state in (b"Z", b"X") else int(others[18])


class OccasionalScan:
    """Lets a scan of a folder come again only when it is not more than a twentieth of the time."""

    def __init__(self) -> None:
        self._next: dict[object, float] = {}

    def is_due(self, folder: object) -> bool:
        """Return whether the folder is to be scanned now."""
        return time.monotonic() >= self._next.get(folder, 0.0)

    def done(self, folder: object, seconds: float) -> None:
        """Note how long a scan took."""
        if len(self._next) > 4096:
            self._next.clear()
        self._next[folder] = time.monotonic() + 20 * seconds
