"""The main jobs without what Python lacks on macOS and Windows; see `other_systems` for what is simulated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import other_systems
import pytest

pytest.importorskip("mypy", reason="typeshed, which says what each system lacks, comes with mypy")


PLATFORMS = ["darwin", "win32"] if sys.platform == "linux" else [sys.platform]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the results of the jobs on each platform, which one process did."""
    folder = tmp_path_factory.mktemp("jobs")
    done = subprocess.run(
        [sys.executable, other_systems.__file__, folder, *PLATFORMS],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("platform", PLATFORMS)
def test_all_jobs(jobs: Path, platform: str) -> None:
    ended = json.loads((jobs / platform / "jobs.json").read_text())
    assert list(ended) == other_systems.JOBS
    failed = "\n".join(f"{name}:\n{text}" for name, text in ended.items() if text)
    assert not failed, failed


def test_what_is_lacking() -> None:
    """Typeshed finds unguarded calls, and missing modules."""
    calls = {"posix_fallocate", "listxattr", "setxattr", "getxattr", "copy_file_range", "O_TMPFILE"}
    assert calls <= other_systems.lacking("os", "darwin")
    more = {"geteuid", "fchown", "pread", "pwrite", "register_at_fork", "O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC"}
    assert calls | more <= other_systems.lacking("os", "win32")
    assert {"pthread_sigmask", "SIGHUP", "SIGKILL"} <= other_systems.lacking("signal", "win32")
    assert "AF_UNIX" in other_systems.lacking("socket", "win32")
    for name in ("fcntl", "pwd", "grp", "resource", "termios"):
        assert other_systems.is_missing(name, "win32") and not other_systems.is_missing(name, "darwin")
    assert not other_systems.is_missing("os", "win32")
