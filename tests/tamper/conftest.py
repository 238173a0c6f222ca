"""Test folders are in memory if there is room: these tests do not depend on what survives a power failure."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash_points import Crasher

MEMORY = Path("/dev/shm")
ROOM_BYTES = 2 << 30


@pytest.fixture(scope="session")
def folder_in_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder where `fsync` takes no time, or an ordinary one."""
    if not os.access(MEMORY, os.W_OK | os.X_OK) or shutil.disk_usage(MEMORY).free < ROOM_BYTES:
        yield tmp_path_factory.mktemp("tamper")
        return
    with tempfile.TemporaryDirectory(prefix="keytools-", dir=MEMORY) as folder:
        yield Path(folder)


@pytest.fixture
def tmp_path(folder_in_memory: Path) -> Iterator[Path]:
    """The test's folder."""
    folder = Path(tempfile.mkdtemp(dir=folder_in_memory))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def crasher() -> Iterator[Crasher]:
    """Runs writers that are killed."""
    crasher = Crasher()
    yield crasher
    crasher.close()
