"""What Arrow calls: file systems that pass everything on, and what a scan may do while it starts.

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
import io
import sys
import time
from pathlib import PurePosixPath
from types import CodeType, FrameType
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow import fs as pafs

from parquet_keytools.runtime.endings import share_with_arrow

C = TypeVar("C", bound=type)

_LOOK_SECONDS = 0.001

_called_by_arrow: set[CodeType] = set()


def called_by_arrow(cls: C) -> C:
    """Remember the methods of a class, inherited ones too, as code that Arrow calls."""
    _called_by_arrow.update(method.__code__ for _, method in inspect.getmembers(cls, inspect.isfunction))
    return cls


def is_thread_of_arrow(frame: FrameType | None) -> bool:
    """Tell whether a thread of Arrow called the function of a frame: one of Python begins with code of Python."""
    return frame is not None and frame.f_back is None


def wait_for_start(frame: FrameType | None) -> None:
    """Wait, where Arrow called on a thread of its own, until no thread of Python is in code that Arrow called."""
    if is_thread_of_arrow(frame):
        while any(map(_is_inside, _stacks())):
            time.sleep(_LOOK_SECONDS)


def _stacks() -> list[list[FrameType]]:
    """Return the stack of each thread.

    No collection may run meanwhile. Before Python 3.11.5 one would wait for ever: it gives away the interpreter,
    and the list of threads stays locked (python/cpython#106883). And one that begins while `f_back` makes an
    object for a frame of another thread lets that thread leave the frame: the object would be one of freed memory.
    """
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


@called_by_arrow
class DelegatingHandler(pafs.FileSystemHandler):  # type: ignore[misc]
    """Passes every call on to another file system."""

    def __init__(self, filesystem: pafs.FileSystem) -> None:
        self.filesystem = filesystem
        share_with_arrow(self)

    def get_type_name(self) -> str:
        """Return the name of the file system underneath."""
        return str(self.filesystem.type_name)

    def normalize_path(self, path: str) -> str:
        """Return the path in its usual form."""
        return str(self.filesystem.normalize_path(path))

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        """Return what is known of some paths."""
        return list(self.filesystem.get_file_info(paths))

    def get_file_info_selector(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        """Return what is known of the files of a folder."""
        return list(self.filesystem.get_file_info(selector))

    def create_dir(self, path: str, recursive: bool) -> None:
        """Create a folder."""
        self.filesystem.create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        """Delete a folder."""
        self.filesystem.delete_dir(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        """Delete what is in a folder."""
        self.filesystem.delete_dir_contents(path, missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        """Refuse to empty a whole file system."""
        raise PermissionError("the contents of a whole file system are not deleted")

    def delete_file(self, path: str) -> None:
        """Delete a file."""
        self.filesystem.delete_file(path)

    def move(self, src: str, dest: str) -> None:
        """Move a file."""
        self.filesystem.move(src, dest)

    def copy_file(self, src: str, dest: str) -> None:
        """Copy a file."""
        self.filesystem.copy_file(src, dest)

    def open_input_stream(self, path: str) -> pa.NativeFile:
        """Open a file for reading in order."""
        return self.open_input_file(path)

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Open a file for reading by ranges."""
        return self.filesystem.open_input_file(path)

    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        """Open a file for writing."""
        return self.filesystem.open_output_stream(path, compression=None)

    def open_append_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        """Refuse: Parquet files are not appended to."""
        raise NotImplementedError("Parquet files are not appended to")


class MaterialFolder(DelegatingHandler):
    """A folder in memory for key material: Arrow reads and writes it here instead of beside its file.

    So an existing key material file is not touched before the new Parquet file is complete, and a reader sees
    the key material that was there when the keys were unwrapped.

    Attributes:
        contents: Name of a file -> bytes; there is only one folder.
    """

    def __init__(self) -> None:
        super().__init__(pafs.LocalFileSystem())
        self.contents: dict[str, bytes] = {}

    def get_type_name(self) -> str:
        """Return a name of its own."""
        return "key-material"

    def normalize_path(self, path: str) -> str:
        """Return the path as it is: a local file system refuses names with a colon that may be URIs."""
        return path

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        """Say which of the paths are there."""
        return [
            pafs.FileInfo(path, pafs.FileType.File, size=len(self.contents[_name(path)]))
            if _name(path) in self.contents
            else pafs.FileInfo(path, pafs.FileType.NotFound)
            for path in paths
        ]

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Open key material."""
        if _name(path) not in self.contents:
            raise FileNotFoundError(path)
        return pa.BufferReader(self.contents[_name(path)])

    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        """Open key material for writing; it is there once it is closed."""
        return pa.PythonFile(_MaterialFile(self, _name(path)), mode="w")

    def move(self, src: str, dest: str) -> None:
        """Rename key material."""
        self.contents[_name(dest)] = self.contents.pop(_name(src))

    def delete_file(self, path: str) -> None:
        """Delete key material."""
        del self.contents[_name(path)]


def _name(path: str) -> str:
    return PurePosixPath(path).name


class _MaterialFile(io.BytesIO):
    def __init__(self, folder: MaterialFolder, name: str) -> None:
        super().__init__()
        self._folder = folder
        self._name = name
        share_with_arrow(self)

    def close(self) -> None:
        if not self.closed:
            self._folder.contents[self._name] = self.getvalue()
        super().close()
