"""What is to be installed for an extra: the packages by name, for ours may have been installed from anywhere."""

from __future__ import annotations

import re
from importlib import metadata

_REQUIREMENT = re.compile(r"""(?P<package>[^;]+?)\s*;.*\bextra\s*==\s*["'](?P<extra>[^"']+)["']""")


def install_hint(extra: str) -> str:
    """Return what to do where the packages of an extra are missing."""
    try:
        requirements = metadata.requires("parquet-keytools") or []
    except metadata.PackageNotFoundError:  # imported from its sources
        requirements = []
    found = [match for text in requirements if (match := _REQUIREMENT.fullmatch(text)) and match["extra"] == extra]
    packages = " ".join(f"'{match['package']}'" for match in found)
    return f"Install what it needs: pip install {packages}" if packages else f"Install the extra [{extra}]"
