"""The comparison in docs/attacks.md.

    python tests/tamper/attack_table.py

updates it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from attacks import ATTACKS, Attacked
from reader_processes import pyarrow_outcomes, spark_outcomes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "attacks.md"
_BEGIN, _END = "<!-- table: begin -->\n\n", "\n\n<!-- table: end -->"


def comparison(attacked: Attacked) -> str:
    """Return the table as Markdown."""
    of_pyarrow, of_spark = pyarrow_outcomes(attacked), spark_outcomes(attacked)
    rows = [
        ("attack", "`read_table`", "`decrypt_file`", "`verify`", "pyarrow", "Spark"),
        ("---",) * 6,
    ]
    for name, attack in ATTACKS.items():
        read, read_error = attacked.read_table(name)
        decrypted, decrypt_error = attacked.decrypt_file(name)
        _, broken = attacked.verify(name)
        rule = f"`{attack.rule}`" if attack.rule in broken else "nothing to see"
        rows.append(
            (
                attack.title,
                _with_error(read, read_error),
                _with_error(decrypted, decrypt_error),
                rule,
                of_pyarrow[name],
                of_spark[name],
            )
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _with_error(outcome: str, error: str) -> str:
    return f"{outcome}: {error}" if error else outcome


def table_of_page() -> str:
    """Return the table in the documentation."""
    return PAGE.read_text(encoding="utf-8").partition(_BEGIN)[2].partition(_END)[0]


def main() -> None:
    """Update the table in the documentation."""
    with tempfile.TemporaryDirectory() as folder:
        table = comparison(Attacked(Path(folder) / "attacks"))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    _, _, after = rest.partition(_END)
    PAGE.write_text(f"{before}{_BEGIN}{table}{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
