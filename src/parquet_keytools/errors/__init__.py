"""Every error that parquet-keytools raises, in one tree with one root.

Each error carries its facts as attributes, and its text says what happened, where, and what to do next. No
text and no attribute ever holds a key, a token or the body of a KMS response.
"""

from __future__ import annotations

from parquet_keytools.errors import files, root
from parquet_keytools.errors.files import *  # noqa: F403 - all that is in its __all__
from parquet_keytools.errors.root import *  # noqa: F403 - likewise

__all__ = root.__all__ + files.__all__

# Tracebacks and pickles have the names that callers import.
for _name in __all__:
    if isinstance(globals()[_name], type):
        globals()[_name].__module__ = __name__
