"""Exceptions that are on their way while a file is closed: it would look whole, and lack rows."""

from __future__ import annotations

import sys


class ExceptionWatch:
    """Finds the exception because of which a file is closed; made when the file is opened.

    `try: ... finally: file.close()` closes a file with an exception on its way, as `except` clauses do.
    """

    def __init__(self) -> None:
        self._known = sys.exception()

    def refuse(self, target: object) -> None:
        """Return if the file may be finished.

        Args:
            target: The file, which must not be written if this raises.

        Raises:
            BaseException: The one that was raised since; whoever let it pass does not see a difference.
        """
        error, known, self._known = sys.exception(), self._known, None
        # The end of what a file is written from is no failure.
        if error is None or error is known or isinstance(error, StopIteration | StopAsyncIteration):
            return
        error.add_note(
            f"{target} is not written, because it was closed while this exception was handled: rows may be "
            "missing. To keep what was written, close it outside of `except` and `finally`."
        )
        raise error
