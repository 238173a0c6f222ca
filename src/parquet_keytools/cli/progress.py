"""A progress bar, on a terminal only."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass
class ByteProgress:
    """How far the work is.

    Attributes:
        advance: Takes the number of bytes that were done since; may be called by any thread.
        move_to: Takes the number of bytes that are done in all.
    """

    advance: Callable[[int], None]
    move_to: Callable[[int], None]


@contextlib.contextmanager
def progress_bar(total_bytes: int) -> Iterator[ByteProgress]:
    """Show a progress bar on stderr while the block runs, if people are looking."""
    if not sys.stderr.isatty():
        yield ByteProgress(lambda _: None, lambda _: None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total_bytes)
        yield ByteProgress(
            lambda size_bytes: progress.advance(task, size_bytes),
            lambda size_bytes: progress.update(task, completed=size_bytes),
        )


@contextlib.contextmanager
def file_counter() -> Iterator[Callable[[object], None]]:
    """Show on stderr how many files are done while the block runs, if people are looking.

    How many there are in all is not known while they are looked for. Call what it yields after each file.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TextColumn("{task.completed:.0f} files"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda _: progress.advance(task)
