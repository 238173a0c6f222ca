"""Every attack ends in the expected error and rule; pyarrow meets the same files."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from attacks import ATTACKS, CHANGED, CRASHED, POLICIES, REFUSED, RIGHT, Attacked, keytools
from reader_processes import pyarrow_outcomes

from parquet_keytools.errors import DecryptionError


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Attacked:
    return Attacked(tmp_path_factory.mktemp("attacks"))


def test_the_good_files_read(attacked: Attacked) -> None:
    for policy in {attack.policy for attack in ATTACKS.values()}:
        with attacked.scene.keytools(policy) as reader:
            assert reader.read_table(attacked.scene.file(policy)).equals(attacked.right)
            assert reader.verify_file(attacked.scene.file(policy)).conforms


@pytest.mark.parametrize("name", ATTACKS)
def test_read_table(attacked: Attacked, name: str) -> None:
    assert attacked.read_table(name) == (ATTACKS[name].outcome, ATTACKS[name].error or "")


@pytest.mark.parametrize("name", ATTACKS)
def test_decrypt_file(attacked: Attacked, name: str) -> None:
    assert attacked.decrypt_file(name) == (ATTACKS[name].outcome, ATTACKS[name].error or "")
    if ATTACKS[name].outcome == REFUSED:
        assert not attacked.paths[name].with_name("decrypted.parquet").exists()


@pytest.mark.parametrize("name", ["algorithm", "algorithm-and-pages"])
def test_all_readers_find_the_algorithm_that_is_not_so(attacked: Attacked, name: str) -> None:
    path, attack = attacked.paths[name], ATTACKS[name]
    target = path.with_name("target.parquet")
    # A table that wants AES-GCM refuses it at once; this table accepts the algorithm that the file names.
    with keytools(**POLICIES[attack.policy], algorithm="AES_GCM_CTR_V1") as reader:
        readers: dict[str, Callable[[], object]] = {
            "read_table": lambda: reader.read_table(path),
            "decrypt_file": lambda: reader.decrypt_file(path, target),
            "dataset": lambda: reader.dataset(path.parent),
            "decryption_properties": lambda: reader.decryption_properties(path),
            "salvage_file": lambda: reader.salvage_file(path, target),
            "rekey_file": lambda: reader.rekey_file(path, target),
        }
        for read in readers.values():
            with pytest.raises(DecryptionError, match=r"AES-GCM, and the file states AES_GCM_CTR_V1"):
                read()
    assert not target.exists()


@pytest.mark.parametrize("name", ATTACKS)
def test_verify(attacked: Attacked, name: str) -> None:
    attack = ATTACKS[name]
    conforms, broken = attacked.verify(name)
    if attack.rule is not None:
        assert attack.rule in broken
    assert conforms is attack.conforms, broken
    # A file conforms only if the attack leaves the data right, or cannot be detected.
    assert not (attack.conforms and attack.error)


PYARROW_IS_DECEIVED = {
    "file",
    "rollback",
    "plaintext",
    "ctr-bit",
    "plaintext-bit",
    "prefix-end",
    "prefix-whole",
    "foreign-file",
    "foreign-footer",
    "foreign-column",
    "footer-key-for-columns",
    "plaintext-columns",
    "plaintext-columns-signed",
}
"""It compares no file with a table, expects no AAD prefix with keys from a KMS, and accepts plaintext files."""


def test_pyarrow(attacked: Attacked) -> None:
    outcomes = pyarrow_outcomes(attacked)
    assert set(outcomes) == set(ATTACKS)
    assert CRASHED not in outcomes.values()
    assert {name for name, outcome in outcomes.items() if outcome == CHANGED} == PYARROW_IS_DECEIVED
    assert {name for name, outcome in outcomes.items() if outcome == RIGHT} == {"kms", "nonce", "prefix-grown"}
