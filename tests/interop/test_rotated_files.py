"""Files of every writer with key material, rotated, and read by every reader that has a KMS client."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from engines import policy as policies
from engines.ours import ARROW_PATH, ArrowPath, ModulePath, keytools
from engines.plain_pyarrow import PlainPyarrow
from engines.policy import EncryptedFile, Policy
from engines.sample import TABLE
from matrix import SPARK
from rotation_case import key_material_file, materials
from soak import SOAK

from parquet_keytools import Keytools
from parquet_keytools.errors import TableMismatchError
from parquet_keytools.rotation.report import Outcome

if TYPE_CHECKING:
    from engines.spark import Spark

pytestmark = [pytest.mark.filterwarnings("ignore::parquet_keytools.config.settings.ConfigurationWarning")]

EXPECTED = TABLE.to_pylist()
POLICIES = [
    policies.COLUMN_KEYS,
    policies.PLAINTEXT_FOOTER,
    policies.SINGLE_256,
    policies.CTR,
    policies.FOOTER_KEY,
    policies.EXTERNAL,
    replace(policies.EXTERNAL, title="external, plaintext footer", plaintext_footer=True),
    replace(policies.EXTERNAL, title="external, single wrapping", double_wrapping=False),
]
WRITERS = [ArrowPath, ModulePath, PlainPyarrow, None]
"""None stands for Spark."""

ROTATIONS: list[dict[str, Any]] = [{}, {"moves": {"pii": "place"}}, {"new_keks": True}]
ROTATION_NAMES = ["same master keys", "move", "new KEKs"]
every_rotation = pytest.mark.parametrize("options", ROTATIONS, ids=ROTATION_NAMES)


def name_of(writer: type[Any] | None) -> str:
    return SPARK if writer is None else writer.__name__


# Policy, rotation and writer are independent: each pair occurs.
TRIPLES = [
    pytest.param(policy, ROTATIONS[r], WRITERS[w], id=f"{name_of(WRITERS[w])}-{ROTATION_NAMES[r]}-{policy.title}")
    for p, policy in enumerate(POLICIES)
    for r in range(3)
    for w in range(3)
    if SOAK or (p + r + w) % 3 == 0
]
PAIRS = [
    pytest.param(policy, writer, id=f"{name_of(writer)}-{policy.title}")
    for p, policy in enumerate(POLICIES)
    for w, writer in enumerate(WRITERS)
    if SOAK or (p + p // 2 + w) % 2 == 0
]


def wrapped_keys(tools: Keytools, path: Path) -> set[str]:
    return {material.kms_wrapped_key for material in materials(tools, path)}


def rotate(policy: Policy, path: Path, options: dict[str, Any]) -> None:
    """Rotate twice, as within an hour, and check that each rotation changed the keys."""
    tools = keytools(policy, moves=options.get("moves"))
    for _ in range(2):
        before = wrapped_keys(tools, path)
        (file,) = tools.rotate(path, **options).files
        if file.outcome is Outcome.NOTHING_TO_ROTATE:
            assert "moves" in options
            continue
        assert file.outcome is Outcome.ROTATED, file
        after = wrapped_keys(tools, path)
        changed = {material.master_key_id for material in materials(tools, path)}
        if "moves" in options:
            assert "pii" not in changed and before != after
        else:
            assert not before & after


@pytest.mark.parametrize(("policy", "options", "writer"), TRIPLES)
def test_pyarrow_reads(tmp_path: Path, policy: Policy, options: dict[str, Any], writer: type[Any]) -> None:
    path = writer().write(policy, tmp_path)
    # Arrow shows more in plaintext footers than the specification allows. A rotation does not change whether a
    # file conforms, once the configuration says where its keys moved to.
    conforms = keytools(policy).verify_file(path).conforms
    rotate(policy, path, options)
    file = EncryptedFile(ARROW_PATH, policy, path)
    assert PlainPyarrow().read(file).to_pylist() == EXPECTED
    moved = keytools(policy, moves=options.get("moves"))
    assert moved.read_table(path).to_pylist() == EXPECTED
    assert moved.verify_file(path).conforms is conforms
    if "moves" in options and policy.column_keys:
        with pytest.raises(TableMismatchError, match="'place'"):
            keytools(policy).read_table(path)


@pytest.mark.parametrize(("policy", "writer"), PAIRS)
def test_spark_reads(spark: Spark, tmp_path: Path, policy: Policy, writer: type[Any] | None) -> None:
    path = (spark if writer is None else writer()).write(policy, tmp_path)
    assert key_material_file(path).is_file() == (policy.key_material == "external")
    rotate(policy, path, {})
    file = EncryptedFile(ARROW_PATH if writer is not None else SPARK, policy, path)
    assert spark.read(file).to_pylist() == EXPECTED
    assert PlainPyarrow().read(file).to_pylist() == EXPECTED
    assert keytools(policy).read_table(path).to_pylist() == EXPECTED


@every_rotation
def test_external_key_material_of_parquet_java(spark: Spark, tmp_path: Path, options: dict[str, Any]) -> None:
    policy = policies.EXTERNAL
    path = spark.write(policy, tmp_path)
    data, before = path.read_bytes(), json.loads(key_material_file(path).read_text())
    rotate(policy, path, options)
    after = json.loads(key_material_file(path).read_text())
    # The references, which the Parquet file has, and their order stay.
    assert path.read_bytes() == data and list(after) == list(before) and after != before
    assert spark.read(EncryptedFile(SPARK, policy, path)).to_pylist() == EXPECTED
