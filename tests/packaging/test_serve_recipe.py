"""docs/recipes/serve-to-other-languages.md: the server of the page, read by DuckDB, dbt-duckdb and JavaScript.

And docs/labels.md with a manifest from dbt itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from recipe_pages import blocks, installed, run_blocks
from typer.testing import CliRunner
from warm_python import WarmPython

from parquet_keytools import Keytools
from parquet_keytools.cli import app

PAGE = "serve-to-other-languages"
HTTPFS = ("duckdb==1.4.4", "duckdb-ext-httpfs==1.4.4.20260205")
"""The last version of DuckDB whose extension is a package on the index."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython) -> Iterator[Path]:
    """The folder of the page, while its server runs."""
    folder = tmp_path_factory.mktemp("served")
    try:
        run_blocks(PAGE, folder, python=warm_python.python, programs=warm_python.command.parent)
        yield folder
    finally:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((folder / "serve.pid").read_text()), signal.SIGTERM)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DuckDB with its extension for HTTP, and dbt-duckdb."""
    venv = tmp_path_factory.mktemp("dbt") / "venv"
    found = installed(venv, *HTTPFS, "dbt-duckdb==1.11.1", "dbt-core==1.11.16")
    (extension,) = venv.rglob("httpfs.duckdb_extension")
    code = f"import duckdb; duckdb.sql(\"install '{extension}'\")"
    subprocess.run([found / "python", "-c", code], env=home(venv), check=True, timeout=60)
    return found


def home(venv: Path) -> dict[str, str]:
    return {**os.environ, "HOME": str(venv)}


def environment(served: Path, programs: Path) -> dict[str, str]:
    url = json.loads((served / "served.json").read_text())["url"]
    return home(programs.parent) | {"FLIGHTS_URL": url}


def run(command: list[str | Path], folder: Path, variables: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_duckdb_and_the_query_of_r(served: Path, programs: Path) -> None:
    (r,) = [text for language, text in blocks(PAGE) if language == "r"]
    (query,) = re.findall(r'query <- "(.*)"', r)
    code = (
        "import duckdb, os, sys; load = duckdb.sql('load httpfs')\n"
        "shown = open('flights.sql').read().replace(\"getenv('FLIGHTS_URL')\", '?').rstrip().rstrip(';')\n"
        "for query in (shown, sys.argv[1]):\n"
        "    print(duckdb.execute(query, [os.environ['FLIGHTS_URL']]).fetchall())\n"
    )
    shown = run([programs / "python", "-c", code, query], served, environment(served, programs))
    assert shown.splitlines() == ["[(1545, 'N14228'), (1714, 'N24211')]"] * 2


@pytest.fixture(scope="module")
def rows_of_dbt(served: Path, programs: Path) -> str:
    """The rows that the page's project made.

    The project has another model, whose columns have labels. Folders `old` and `new` have two states of them.
    One process makes all this: dbt's imports take seconds, and so does parsing another project.
    """
    (served / "models" / "customers.sql").write_text(MODEL)
    changed = SCHEMA.replace("class: pii", "class: public", 1).replace("class: pii", "class: payment")
    for state, schema in (("old", SCHEMA), ("new", changed)):
        (served / state / "models").mkdir(parents=True)
        (served / state / "models" / "schema.yml").write_text(schema)
        (served / state / "keytools.yaml").write_text(CONFIGURATION)
    code = (
        "import duckdb, shutil\n"
        "from dbt.cli.main import dbtRunner\n"
        "for command, state in (('run', 'old'), ('parse', 'new')):\n"
        "    shutil.copy(f'{state}/models/schema.yml', 'models')\n"
        "    done = dbtRunner().invoke([command, '--profiles-dir', '.', '--quiet'])\n"
        "    assert done.success, (command, done.exception)\n"
        "    shutil.copytree('target', f'{state}/target')\n"
        "with duckdb.connect('flights.duckdb') as connection:\n"
        "    print(connection.sql('from late_flights order by 1').fetchall())\n"
    )
    variables = environment(served, programs) | {"DBT_SEND_ANONYMOUS_USAGE_STATS": "false"}
    return run([programs / "python", "-c", code], served, variables)


def test_dbt_duckdb(rows_of_dbt: str) -> None:
    assert rows_of_dbt.splitlines()[-1] == "[(1545,), (1714,)]"


def test_javascript(served: Path) -> None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed: JavaScript does not read what `serve` shows")
    done = subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "hyparquet@1.31.5", "hyparquet-compressors@1.1.2"],
        cwd=served,
        capture_output=True,
        timeout=200,
    )
    if done.returncode:
        pytest.skip("npm does not offer hyparquet here: JavaScript does not read what `serve` shows")
    assert run(["node", "flights.mjs"], served, dict(os.environ)) == "3 N14228\n"


# --- labels ---

MODEL = "{{ config(materialized='table') }}\nselect 1 as id, 'a@b' as email, '4' as card\n"
SCHEMA = """\
version: 2
models:
  - name: customers
    columns:
      - name: id
        config: {tags: [public]}
      - name: email
        config: {meta: {class: pii}}
      - name: card
        config: {meta: {class: pii}}
"""
CONFIGURATION = """\
version: 1
kms: {type: in_memory, keys: [footer, pii, pci]}
classes: {pii: {key: pii}, payment: {key: pci}, public: plaintext}
tables:
  customers: {footer_key: footer, labels_from: [dbt: target/manifest.json]}
"""


@pytest.mark.usefixtures("rows_of_dbt")
def test_labels_of_a_dbt_project_that_change_between_two_builds(served: Path) -> None:
    table = pa.table({"id": [1], "email": ["a@b"], "card": ["4"]})

    def keys(folder: Path) -> dict[str, str | None]:
        """Write the model, and return the key of each of its columns."""
        with Keytools.from_yaml(folder / "keytools.yaml") as keytools:
            keytools.write_table(table, folder / "customers.parquet")
            columns = keytools.inspect_file(folder / "customers.parquet").columns
        return {column.path: column.key and column.key.name for column in columns}

    assert keys(served / "old") == {"id": None, "email": "pii", "card": "pii"}
    assert keys(served / "new") == {"id": None, "email": None, "card": "pci"}
    config, old = (str(served / folder / "keytools.yaml") for folder in ("new", "old"))
    done = CliRunner().invoke(app, ["check", config, "--against", old, "--json"])
    assert done.exit_code == 1
    weaker = [change for change in json.loads(done.stdout)["changes"] if change["is_weaker"]]
    assert [(change["what"], change["place"]) for change in weaker] == [("email", "public by models/schema.yml:7")]
