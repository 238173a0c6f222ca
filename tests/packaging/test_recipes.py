"""docs/recipes/*.md: the pages that need no service; tests/interop and tests/services test the others."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from recipe_pages import installed, run_blocks
from typer.testing import CliRunner
from warm_python import WarmPython

from parquet_keytools import Keytools
from parquet_keytools.cli import app

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["migrate-from-pyarrow", "editor", "../labels", "../erase", "../erase-rows"])
def test_all_blocks_run_as_printed(page: str, tmp_path: Path, warm_python: WarmPython) -> None:
    run_blocks(page, tmp_path, python=warm_python.python, programs=warm_python.command.parent)


# --- pull requests ---

PULL_REQUESTS = "check-pull-requests"
HOOKS = {
    hook["id"]: hook for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython) -> Path:
    """The page's files in a repository, and an encrypted file."""
    folder = tmp_path_factory.mktemp("repository")
    run_blocks(PULL_REQUESTS, folder, python=warm_python.python, programs=warm_python.command.parent)
    encrypted = {"footer_key": "footer", "unlisted_columns": "footer_key", "aad_prefix": "{file_name}/"}
    document = {"version": 1, "kms": {"type": "in_memory", "keys": ["footer"]}, "tables": {"t": encrypted}}
    Keytools.from_mapping(document).write_table(pa.table({"name": ["Ann"]}), folder / "encrypted.parquet")
    return folder


@pytest.fixture
def changed(repository: Path, tmp_path: Path) -> Path:
    """A copy, for a test that changes it."""
    return shutil.copytree(repository, tmp_path / "changed")


def jobs(folder: Path) -> list[tuple[dict[str, str], list[str]]]:
    """Return the variables and scripts of both jobs, without the installation."""
    github = yaml.safe_load((folder / ".github" / "workflows" / "keytools.yml").read_text())["jobs"]["check"]
    gitlab = yaml.safe_load((folder / ".gitlab-ci.yml").read_text())["keytools"]
    scripts = [step["run"] for step in github["steps"] if "run" in step], gitlab["script"]
    return [
        (variables, [script for script in job if not script.startswith("pip install")])
        for variables, job in zip((github["env"], gitlab["variables"]), scripts, strict=True)
    ]


def run_jobs(folder: Path, warm: WarmPython) -> list[list[int]]:
    """Return the exit statuses of the scripts of each job."""
    statuses: list[list[int]] = []
    for variables, scripts in jobs(folder):
        path = f"{warm.command.parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, **variables}
        done = [
            subprocess.run(["bash", "-ec", script], cwd=folder, env=environment, capture_output=True, timeout=60)
            for script in scripts
        ]
        statuses.append([one.returncode for one in done])
    return statuses


def test_the_jobs_pass(repository: Path, warm_python: WarmPython) -> None:
    assert run_jobs(repository, warm_python) == [[0, 0], [0, 0]]
    (checkout,) = re.findall(r"uses: (actions/checkout@.*)", (ROOT / ".github/workflows/checks.yml").read_text())
    assert checkout in (repository / ".github/workflows/keytools.yml").read_text()


def test_a_new_column_fails_the_jobs(changed: Path, warm_python: WarmPython) -> None:
    schema = pq.read_schema(changed / "schemas" / "flights.parquet").append(pa.field("iban", pa.string()))
    pq.write_table(schema.empty_table(), changed / "schemas" / "flights.parquet")
    assert run_jobs(changed, warm_python) == [[0, 2], [0, 2]]


def test_a_warning_fails_the_jobs(changed: Path, warm_python: WarmPython) -> None:
    people = changed / "keytools" / "people.yaml"
    people.write_text(people.read_text() + "    algorithm: AES_GCM_CTR_V1\n")
    assert run_jobs(changed, warm_python) == [[1, 0], [1, 0]]


def run_hook(name: str, *files: Path) -> int:
    """Run a hook as pre-commit does: its entry, and the names of the files that its pattern matches."""
    chosen = [str(file) for file in files if re.search(HOOKS[name]["files"], file.as_posix())]
    assert len(chosen) == len(files)
    return CliRunner().invoke(app, [*shlex.split(HOOKS[name]["entry"])[1:], *chosen]).exit_code


def test_the_hooks(changed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VAULT_TOKEN", "not-used")
    configs = sorted((changed / "keytools").glob("*.yaml"))
    assert run_hook("parquet-keytools-check", *configs) == 0
    configs[0].write_text(configs[0].read_text().replace("footer_key:", "footer_kay:"))
    assert run_hook("parquet-keytools-check", *configs) == 2
    assert not re.search(HOOKS["parquet-keytools-check"]["files"], ".github/workflows/keytools.yml")
    encrypted, plaintext = changed / "encrypted.parquet", changed / "schemas" / "flights.parquet"
    assert run_hook("parquet-keytools-verify", encrypted) == 0
    assert run_hook("parquet-keytools-verify", encrypted, plaintext) == 1


def test_pre_commit_itself_runs_the_hooks(
    changed: Path, tmp_path: Path, warm_python: WarmPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the installed package instead of an environment made by pre-commit."""
    programs = installed(tmp_path / "venv", "pre-commit==4.7.0")
    monkeypatch.setenv("PATH", f"{warm_python.command.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PRE_COMMIT_HOME", str(tmp_path / "pre-commit"))
    monkeypatch.setenv("VAULT_TOKEN", "not-used")
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "a")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@example.org")
    (tmp_path / "library").mkdir()
    shutil.copy(ROOT / ".pre-commit-hooks.yaml", tmp_path / "library")

    def git(folder: Path, *arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    for folder in (tmp_path / "library", changed):
        git(folder, "init", "-q")
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", "all", "--no-verify")
    document = yaml.safe_load((changed / ".pre-commit-config.yaml").read_text())
    (library,) = document["repos"]
    library |= {"repo": str(tmp_path / "library"), "rev": git(tmp_path / "library", "rev-parse", "HEAD")}
    for hook in library["hooks"]:
        hook.pop("additional_dependencies", None)
        hook["language"] = "system"
    (changed / ".pre-commit-config.yaml").write_text(yaml.safe_dump(document))

    def pre_commit() -> subprocess.CompletedProcess[str]:
        command: list[str | Path] = [programs / "pre-commit", "run", "--all-files", "--color=never"]
        return subprocess.run(command, cwd=changed, capture_output=True, text=True, timeout=120, check=False)

    done = pre_commit()
    assert (done.returncode, done.stdout.count("Passed")) == (0, 2), done.stdout + done.stderr
    shutil.copy(changed / "schemas" / "flights.parquet", changed / "plain.parquet")
    git(changed, "add", "-A")
    done = pre_commit()
    assert (done.returncode, done.stdout.count("Passed"), done.stdout.count("Failed")) == (1, 1, 1)
