"""docs/tenants.md: its first blocks work as printed, in their order, in one folder."""

import os
import re
import subprocess
from pathlib import Path

import yaml
from warm_python import WarmPython

from parquet_keytools import Keytools

PAGE = (Path(__file__).parents[2] / "docs" / "tenants.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    found: list[str] = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return found


def test_blocks_run_as_printed(tmp_path: Path, warm_python: WarmPython) -> None:
    environment = os.environ | {"PATH": f"{warm_python.command.parent}{os.pathsep}{os.environ['PATH']}"}
    config, policy, tables = blocks("yaml")
    (program,) = blocks("python")
    create, show = blocks("bash")
    (tmp_path / "keytools.yaml").write_text(config)
    shown = ""
    for command in (
        ["bash", "-euo", "pipefail", "-c", create],
        [str(warm_python.python), "-c", program],
        ["bash", "-euo", "pipefail", "-c", show],
    ):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        shown += done.stdout
    assert "acme: created: prod/tenant-acme" in shown and "prod/tenant-bolt" in shown
    # The two tables of a move are valid, and the template is one that `tenants create` accepts.
    document = yaml.safe_load(config)
    document["master_keys"]["pii"] = document["master_keys"].pop("pii", "footer")
    document["tables"] = yaml.safe_load(tables)["tables"]
    (tmp_path / "keytools.yaml").write_text(yaml.safe_dump(document))
    with Keytools.from_yaml(tmp_path / "keytools.yaml") as keytools:
        assert sorted(keytools.configuration.tables) == ["before", "events"]
    assert set(yaml.safe_load(policy)) == {"tags", "policy"}
