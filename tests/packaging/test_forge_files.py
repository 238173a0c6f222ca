"""The files of the forge and pre-commit: they parse, name existing things, and have only the rights they need."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def parsed(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    return parsed(path)["jobs"]


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in jobs(path).values():
        yield from job["steps"]


@pytest.mark.parametrize(
    "path", sorted([*GITHUB.rglob("*.yml"), ROOT / ".pre-commit-config.yaml"]), ids=lambda path: path.name
)
def test_it_parses(path: Path) -> None:
    assert isinstance(parsed(path), dict)


def test_there_are_workflows() -> None:
    assert {path.stem for path in WORKFLOWS} == {"checks", "docs", "release", "tests"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_to_commits(path: Path) -> None:
    """A tag can be moved to other code; a commit cannot."""
    text = path.read_text(encoding="utf-8")
    used = re.findall(r"^\s*(?:- )?uses: (.*)$", text, re.M)
    assert len(used) == sum("uses" in step for step in steps(path)) > 0
    assert [line for line in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []


def test_an_action_has_one_version() -> None:
    pins: dict[str, set[str]] = {}
    for path in WORKFLOWS:
        for step in steps(path):
            name, _, commit = step.get("uses", "").partition("@")
            pins.setdefault(name, set()).add(commit)
    assert {name: commits for name, commits in pins.items() if len(commits) > 1} == {}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_rights_are_few(path: Path) -> None:
    document = parsed(path)
    assert document["permissions"] == {"contents": "read"}
    given = {name: job["permissions"] for name, job in jobs(path).items() if "permissions" in job}
    expected = {
        "attest": {"id-token": "write", "attestations": "write"},
        "publish": {"id-token": "write"},
    }
    assert given == (expected if path.stem == "release" else {})
    for step in steps(path):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False
    assert all("timeout-minutes" in job for job in jobs(path).values())
    # `pull_request_target` would run the code of strangers with our rights. YAML reads the key `on` as true.
    assert "pull_request_target" not in str(document[True])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_no_text_of_strangers_gets_into_a_shell(path: Path) -> None:
    """An expression in a script is code: the name of a branch or tag comes through an environment variable."""
    assert [step["run"] for step in steps(path) if "${{" in step.get("run", "")] == []


def test_nothing_is_published_without_the_environment() -> None:
    (publisher,) = [
        job for job in jobs(GITHUB / "workflows" / "release.yml").values() if "pypi-publish" in str(job)
    ]
    assert publisher["environment"] == "pypi"
    assert "password" not in str(publisher)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_make_has_the_targets(path: Path) -> None:
    named = set(re.findall(r"\bmake ([a-z]+)", "\n".join(step.get("run", "") for step in steps(path))))
    assert {target for target in named if not re.search(rf"^{target}:", MAKEFILE, re.M)} == set()
    assert named


def test_scripts_name_files_that_there_are() -> None:
    scripts = "\n".join(step.get("run", "") for path in WORKFLOWS for step in steps(path))
    named = set(re.findall(r"\b(?:tests|docs|src|benchmarks)/[\w./-]+", scripts))
    assert named
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_all_supported_versions_are_tested() -> None:
    tests = jobs(GITHUB / "workflows" / "tests.yml")["tests"]
    matrix = tests["strategy"]["matrix"]
    classified = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if ":: 3." in line]
    assert matrix["python"] == classified
    assert PROJECT["requires-python"] == f">={classified[0]}"
    assert matrix["versions"] == ["locked"]
    included = {(item["os"].partition("-")[0], item["python"], item["versions"]) for item in matrix["include"]}
    assert included == {("macos", "3.13", "locked"), ("ubuntu", classified[0], "lowest")}
    assert "continue-on-error" not in tests


def test_the_newest_versions_block_nobody() -> None:
    workflow = GITHUB / "workflows" / "tests.yml"
    newest = jobs(workflow)["newest"]
    assert newest["if"] == "github.event_name == 'schedule'"
    assert newest["continue-on-error"] is True
    assert "make test VERSIONS=newest" in [step.get("run") for step in newest["steps"]]
    assert "schedule" in parsed(workflow)[True]


def test_security_problems_do_not_become_issues() -> None:
    (note, *_) = parsed(GITHUB / "ISSUE_TEMPLATE" / "bug.yml")["body"]
    assert "Report a vulnerability" in note["attributes"]["value"]
    assert "Report a vulnerability" in (ROOT / "SECURITY.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_issue_forms_have_what_the_forge_wants(name: str) -> None:
    form = parsed(GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml")
    assert {"name", "description", "body"} <= form.keys()
    questions = [item for item in form["body"] if item["type"] != "markdown"]
    assert len({item["id"] for item in questions}) == len(questions)
    assert all(item["attributes"]["label"] for item in questions)


def test_hooks_run_what_make_check_runs() -> None:
    (repository,) = parsed(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    definitions = re.findall(r"^(?:CHECKS|OTHER_SYSTEMS) := (.*)$", MAKEFILE, re.M)
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", MAKEFILE, re.M)
    assert recipe is not None
    assert recipe[1].strip() == "$(CHECKS) && $(OTHER_SYSTEMS)"
    checks = [
        check.replace("$(BIN)", ".venv/bin").removesuffix(" .") for check in " && ".join(definitions).split(" && ")
    ]
    hooks = [hook["entry"].replace(" --force-exclude", "") for hook in repository["hooks"]]
    assert hooks == checks
    assert all(hook["language"] == "system" for hook in repository["hooks"])
