"""Which engine reads which other engine's files, and whose limit it is if one cannot.

    python tests/interop/matrix.py

updates the tables in docs/interoperability.md.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa
from engines import policy as policies
from engines.duckdb_engine import DuckDb
from engines.ours import ARROW_PATH, MODULE_PATH, ArrowPath, ModulePath
from engines.plain_pyarrow import PlainPyarrow
from engines.polars_engine import Polars
from engines.policy import EncryptedFile, Policy
from engines.sample import sample
from engines.spark_bridge import SPARK_BRIDGE, WRITABLE, SparkBridge

from parquet_keytools.config.settings import ConfigurationWarning
from parquet_keytools.errors import KeytoolsError

if TYPE_CHECKING:
    from engines.spark import Spark

PYARROW, SPARK, POLARS, DUCKDB = "pyarrow", "Spark", "Polars", "DuckDB"
ENGINES = (ARROW_PATH, MODULE_PATH, SPARK_BRIDGE, PYARROW, SPARK, POLARS, DUCKDB)
OURS = (ARROW_PATH, MODULE_PATH)
ON_SPARK = (SPARK_BRIDGE, SPARK)

WRITES: dict[str, tuple[Policy, ...]] = {
    ARROW_PATH: policies.ARROW_CAN,
    MODULE_PATH: (
        *policies.ARROW_CAN,
        policies.UNLISTED,
        policies.PREFIX_STORED,
        policies.PREFIX_SUPPLIED,
        *policies.WITHOUT_KMS,
    ),
    SPARK_BRIDGE: WRITABLE,
    PYARROW: policies.ARROW_CAN,
    SPARK: (*policies.ARROW_CAN, policies.UNLISTED),
    POLARS: policies.WITHOUT_KMS,
    DUCKDB: (policies.DATA_KEYS_FLAT,),
}
"""The tested cases that each engine can write."""

CALLED_WRONGLY = (TypeError, AttributeError, NameError, ImportError)
"""Not a limit of an engine, but a mistake in how the tests call it."""

ROWS = [(writer, policy) for writer in ENGINES for policy in WRITES[writer]]


class Engine(Protocol):
    """Something that writes and reads encrypted files."""

    def write(self, policy: Policy, folder: Path) -> Path:
        """Write the sample into a folder, and return the file."""

    def read(self, file: EncryptedFile) -> pa.Table:
        """Read a file."""


@dataclass(frozen=True)
class Limit:
    """Why a reader cannot read a file.

    Attributes:
        whose: The engine that has the limit.
        sentence: What it does not do.
        applies: Whether it affects a file and a reader.
    """

    whose: str
    sentence: str
    applies: Callable[[EncryptedFile, str], bool]


LIMITS = (
    Limit(
        SPARK_BRIDGE,
        "takes keys from a KMS only.",
        lambda file, reader: reader == SPARK_BRIDGE and file.policy.data_keys,
    ),
    Limit(
        DUCKDB,
        "encrypts without an AAD and writes no `aad_file_unique`, which the specification demands.",
        lambda file, reader: file.writer == DUCKDB and reader != DUCKDB,
    ),
    Limit(
        DUCKDB,
        "does not read files with a plaintext footer.",
        lambda file, reader: reader == DUCKDB and file.policy.plaintext_footer,
    ),
    Limit(
        "DuckDB and Polars",
        "have no AES_GCM_CTR_V1.",
        lambda file, reader: reader in (DUCKDB, POLARS) and file.policy.algorithm == "AES_GCM_CTR_V1",
    ),
    Limit(
        DUCKDB,
        "takes one key for a whole file.",
        lambda file, reader: reader == DUCKDB and file.policy.column_keys,
    ),
    Limit(
        DUCKDB,
        "reads flat columns with one page a chunk and no Bloom filter, and nothing else.",
        lambda file, reader: reader == DUCKDB and not file.policy.flat,
    ),
    Limit(
        "Spark (parquet-java)",
        "encrypts only the values of V2 data pages: it leaves their levels in plaintext, and expects other "
        "writers to do the same, but they encrypt the page as a whole.",
        lambda file, reader: (
            file.policy.data_page_version == 2 and (file.writer in ON_SPARK) != (reader in ON_SPARK)
        ),
    ),
    Limit(
        "pyarrow and Spark",
        "take no AAD prefix together with keys from a KMS.",
        lambda file, reader: reader in (PYARROW, SPARK) and file.policy == policies.PREFIX_SUPPLIED,
    ),
    Limit(
        PYARROW,
        "takes no data keys for single columns.",
        lambda file, reader: reader == PYARROW and file.policy.data_keys and file.policy.column_keys,
    ),
)


class Matrix:
    """The engines, and the files that they wrote so far."""

    def __init__(self, folder: Path) -> None:
        self.engines: dict[str, Engine] = {
            ARROW_PATH: ArrowPath(),
            MODULE_PATH: ModulePath(),
            PYARROW: PlainPyarrow(),
            POLARS: Polars(),
            DUCKDB: DuckDb(),
        }
        self._folder = folder
        self._files: dict[tuple[str, Policy], EncryptedFile] = {}
        self._outcomes: dict[tuple[str, Policy, str], Limit | None] = {}

    def add_spark(self, spark: Spark) -> None:
        """Let Spark take part, with keys of its own and with ours."""
        self.engines |= {SPARK: spark, SPARK_BRIDGE: SparkBridge(spark, self._folder)}

    def file(self, writer: str, policy: Policy) -> EncryptedFile:
        """Return the file of a row."""
        if (writer, policy) not in self._files:
            folder = self._folder / str(len(self._files))
            folder.mkdir()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConfigurationWarning)
                path = self.engines[writer].write(policy, folder)
            self._files[writer, policy] = EncryptedFile(writer, policy, path)
        return self._files[writer, policy]

    def outcome(self, writer: str, policy: Policy, reader: str) -> Limit | None:
        """Return the limit that affects a file and a reader; None if the file is read correctly.

        Raises:
            AssertionError: It is read and should not be, is not read and should be, or is read incorrectly.
        """
        cell = (writer, policy, reader)
        if cell not in self._outcomes:
            self._outcomes[cell] = self._find_outcome(self.file(writer, policy), reader)
        return self._outcomes[cell]

    def _find_outcome(self, file: EncryptedFile, reader: str) -> Limit | None:
        limit = next((limit for limit in LIMITS if limit.applies(file, reader)), None)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConfigurationWarning)
                table = self.engines[reader].read(file)
        except Exception as error:
            if limit is None:
                raise
            # The wording is another project's, and changes.
            was_expected = (
                isinstance(error, KeytoolsError) if reader in OURS else not isinstance(error, CALLED_WRONGLY)
            )
            assert was_expected, f"{limit.sentence} was expected, but: {error!r}"
            return limit
        assert limit is None, f"{limit.whose} can do this now; remove from the limits: {limit.sentence}"
        assert table.to_pylist() == sample(file.policy).to_pylist()
        return None


def said_of(limit: Limit) -> str:
    """Return what the documentation says about a limit."""
    return f"{limit.whose}: {limit.sentence}"


def tables(matrix: Matrix) -> str:
    """Return the tables as Markdown, from the results."""
    notes: list[Limit] = []
    detail = [("written by", "how", *ENGINES), ("---", "---", *("---" for _ in ENGINES))]
    counts = {(writer, reader): [0, 0] for writer in ENGINES for reader in ENGINES}
    for writer, policy in ROWS:
        cells = []
        for reader in ENGINES:
            limit = matrix.outcome(writer, policy, reader)
            if limit is not None and limit not in notes:
                notes.append(limit)
            cells.append("yes" if limit is None else f"no ({notes.index(limit) + 1})")
            counts[writer, reader][0] += limit is None
            counts[writer, reader][1] += 1
        detail.append((writer, policy.title, *cells))
    overview = [("written by", *ENGINES), ("---", *("---" for _ in ENGINES))]
    for writer in ENGINES:
        overview.append((writer, *("{} of {}".format(*counts[writer, reader]) for reader in ENGINES)))
    limits = [f"{number}. {said_of(note)}" for number, note in enumerate(notes, 1)]
    return "\n\n".join(map("\n".join, (_lines(overview), _lines(detail), limits)))


def _lines(rows: list[tuple[str, ...]]) -> Iterator[str]:
    return ("| " + " | ".join(row) + " |" for row in rows)


PAGE = Path(__file__).parents[2] / "docs" / "interoperability.md"
_BEGIN, _END = "<!-- tables: begin -->\n\n", "\n\n<!-- tables: end -->"


def tables_of_page() -> str:
    """Return the tables in the documentation."""
    return _page_parts()[1]


def _page_parts() -> tuple[str, str, str]:
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    between, _, after = rest.partition(_END)
    return before, between, after


def main() -> None:
    """Update the tables in the documentation."""
    from engines.spark import Spark, spark_session

    with tempfile.TemporaryDirectory() as folder:
        for name in ("spark", "matrix"):
            (Path(folder) / name).mkdir()
        with spark_session(Path(folder) / "spark") as session:
            matrix = Matrix(Path(folder) / "matrix")
            matrix.add_spark(Spark(session))
            before, _, after = _page_parts()
            PAGE.write_text(f"{before}{_BEGIN}{tables(matrix)}{_END}{after}")


if __name__ == "__main__":
    main()
