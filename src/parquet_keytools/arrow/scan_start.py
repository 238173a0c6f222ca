"""What a scan may do while it starts.

pyarrow's `Scanner.to_reader` starts a scan without giving away the interpreter; DuckDB calls it. Threads of Arrow
that come to the next file meanwhile, or to an error, want the interpreter, and hold a lock that the caller needs:
both would wait for ever. So nothing goes on before the start is over. A file that is opened on the thread of the
caller is read when that thread has come back from all code that Arrow called, and what is wrong with the file
comes from reading it.

A thread may lose the interpreter at any instruction of ours, so nothing that it says of itself is early enough to
tell whether it is still in the start; its stack is. A thread of Arrow that has the interpreter, while no thread of
Python is in code that Arrow called, is past the start.
"""

from __future__ import annotations

import inspect
import sys
import time
from types import CodeType, FrameType
from typing import TypeVar

from parquet_keytools.format.collector import paused_collector

C = TypeVar("C", bound=type)

_LOOK_SECONDS = 0.001

_called_by_arrow: set[CodeType] = set()


def called_by_arrow(cls: C) -> C:
    """Remember the methods of a class, inherited ones too, as code that Arrow calls."""
    _called_by_arrow.update(method.__code__ for _, method in inspect.getmembers(cls, inspect.isfunction))
    return cls


def is_thread_of_arrow(frame: FrameType | None) -> bool:
    """Tell whether a call came from a thread of Arrow: one of Python has begun with code of Python.

    Args:
        frame: Of the function that Arrow called.
    """
    return frame is not None and frame.f_back is None


def wait_for_start(frame: FrameType | None) -> None:
    """Wait, on a thread of Arrow, until no thread of Python is in code that Arrow called.

    Args:
        frame: Of the function that Arrow called.
    """
    if is_thread_of_arrow(frame):
        while any(map(_is_inside, _stacks())):
            time.sleep(_LOOK_SECONDS)


def _stacks() -> list[list[FrameType]]:
    """Return the stack of each thread.

    No collection may run meanwhile. Before Python 3.11.5 one would wait for ever: it gives away the interpreter,
    and the list of threads stays locked (python/cpython#106883). And one that begins while `f_back` makes an
    object for a frame of another thread lets that thread leave the frame: the object would be one of freed memory.
    """
    with paused_collector():
        return [_stack(frame) for frame in sys._current_frames().values()]


def _stack(frame: FrameType | None) -> list[FrameType]:
    """Return a frame and those that called it, the last first."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _is_inside(stack: list[FrameType]) -> bool:
    is_of_python = stack[-1].f_code not in _called_by_arrow
    return is_of_python and any(frame.f_code in _called_by_arrow for frame in stack)
