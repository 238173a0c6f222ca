"""What the exit status of a command says."""

from __future__ import annotations

from enum import IntEnum


class ExitStatus(IntEnum):
    """The exit statuses; those above 128 are what shells say of a process that a signal has ended."""

    DONE = 0
    NO = 1
    WRONG_USAGE = 2
    KMS_FAILED = 3
    INTERRUPTED = 130
    NOBODY_READS = 141
    TERMINATED = 143
