"""docs/recipes/serve-to-other-languages.md: the server of the page, read by DuckDB, dbt-duckdb and JavaScript."""

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

import pytest
from recipe_pages import blocks, installed, run_blocks

PAGE = "serve-to-other-languages"
HTTPFS = ("duckdb==1.4.4", "duckdb-ext-httpfs==1.4.4.20260205")
"""The last version of DuckDB whose extension is a package of the index."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the page, while its server runs."""
    folder = tmp_path_factory.mktemp("served")
    try:
        run_blocks(PAGE, folder)
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
    return home(programs.parent) | {"FLIGHTS_URL": url, "DBT_SEND_ANONYMOUS_USAGE_STATS": "false"}


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


def test_dbt_duckdb(served: Path, programs: Path) -> None:
    variables = environment(served, programs)
    run([programs / "dbt", "run", "--profiles-dir", "."], served, variables)
    code = (
        "import duckdb\n"
        "with duckdb.connect('flights.duckdb') as connection:\n"
        "    print(connection.sql('from late_flights order by 1').fetchall())\n"
    )
    assert run([programs / "python", "-c", code], served, variables) == "[(1545,), (1714,)]\n"


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
