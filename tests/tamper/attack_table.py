"""The comparison in docs/attacks.md.

    python tests/tamper/attack_table.py

writes it anew, from what is found.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "interop"))

from attacks import ATTACKS, CHANGED, MASTER_KEYS, REFUSED, RIGHT, Attacked
from pyarrow_outcomes import pyarrow_outcomes

if TYPE_CHECKING:
    from engines.spark import Spark

PAGE = Path(__file__).resolve().parents[2] / "docs" / "attacks.md"
_BEGIN, _END = "<!-- table: begin -->\n\n", "\n\n<!-- table: end -->"


def spark_outcomes(attacked: Attacked, spark: Spark) -> dict[str, str]:
    """Return what Spark makes of the attacks."""
    from engines.policy import COLUMN_KEYS, EncryptedFile
    from engines.sample import MASTER_KEYS as SPARK_MASTER_KEYS

    assert SPARK_MASTER_KEYS == MASTER_KEYS
    outcomes = {}
    for name, path in attacked.paths.items():
        try:
            found = spark.read(EncryptedFile("attacker", COLUMN_KEYS, path))
        except Exception:
            outcomes[name] = REFUSED
        else:
            outcomes[name] = RIGHT if found.sort_by("x").to_pylist() == attacked.right.to_pylist() else CHANGED
    return outcomes


def comparison(attacked: Attacked, spark: Spark) -> str:
    """Return the table as Markdown."""
    of_pyarrow, of_spark = pyarrow_outcomes(attacked), spark_outcomes(attacked, spark)
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
    """Return the table as it stands in the documentation."""
    return PAGE.read_text(encoding="utf-8").partition(_BEGIN)[2].partition(_END)[0]


def main() -> None:
    """Write the table in the documentation anew."""
    from engines.spark import Spark, spark_session

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "spark").mkdir()
        with spark_session(Path(folder) / "spark") as session:
            table = comparison(Attacked(Path(folder) / "attacks"), Spark(session))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    _, _, after = rest.partition(_END)
    PAGE.write_text(f"{before}{_BEGIN}{table}{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
