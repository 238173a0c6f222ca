from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
import yaml

from parquet_keytools import Keytools
from parquet_keytools.errors import KmsError, KmsResponseInvalidError
from parquet_keytools.kms.client import WrapRequest
from parquet_keytools.secret_bytes import SecretBytes


def test_a_secret_is_made_pasted_and_rewrapped(run, config: Path, tmp_path: Path) -> None:
    done = run("hash-key", "pseudo nyms", "--master-key", "times", "--config", config)
    assert done.exit_code == 0 and "new secret" in done.stderr
    document = yaml.safe_load(config.read_text()) | yaml.safe_load(done.stdout)
    assert document["hash_keys"]["pseudo nyms"]["master_key"] == "times"
    document["tables"]["people"]["hash_key"] = "pseudo nyms"
    config.write_text(yaml.safe_dump(document))
    path = tmp_path / "hashed.parquet"
    Keytools.from_yaml(config).write_table(pa.table({"name": ["Ann", "Ben", "Ann"]}), path)

    def digests() -> list[str]:
        keytools = Keytools.from_mapping(document | {"reading": {"denied_columns": "hash"}})
        return list(keytools.read_table(path)["name"].to_pylist())

    first = digests()
    assert first[0] == first[2] != first[1] and len(first[0]) == 32
    for options, master_key in (((), "times"), (("--master-key", "pii"), "pii")):
        done = run("hash-key", "pseudo nyms", "--config", config, *options)
        assert done.exit_code == 0 and "digests stay the same" in done.stderr
        again = yaml.safe_load(done.stdout)
        assert again["hash_keys"]["pseudo nyms"]["master_key"] == master_key
        assert again["hash_keys"] != document["hash_keys"]
        document |= again
        config.write_text(yaml.safe_dump(document))
        assert digests() == first
    done = run("check", config)
    assert done.exit_code == 0 and "no mistakes" in done.stdout
    document["hash_keys"]["pseudo nyms"]["wrapped_key"] = "AAAA"
    config.write_text(yaml.safe_dump(document))
    done = run("check", config)
    assert done.exit_code == 3 and "no mistakes" not in done.stdout


def test_what_makes_no_secret_is_an_error(run, config: Path, deny) -> None:
    done = run("hash-key", "p", "--config", config)
    assert done.exit_code == 2 and "--master-key" in done.stderr and done.stdout == ""
    done = run("hash-key", "p", "--config", config, "--master-key", "pi")
    assert done.exit_code == 3 and "'pi'" in done.stderr and done.stdout == ""
    deny("pii")
    done = run("hash-key", "p", "--config", config, "--master-key", "pii")
    assert done.exit_code == 3 and done.stdout == ""


def test_a_wrapped_secret_that_does_not_open_is_not_handed_out(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keytools = Keytools.from_yaml(config)
    assert keytools.kms is not None
    wrap_many = keytools.kms.wrap_many

    def wrap_others(requests: Sequence[WrapRequest]) -> list[str | KmsError]:
        return wrap_many([WrapRequest(SecretBytes.random(256), request.master_key_id) for request in requests])

    monkeypatch.setattr(keytools.kms, "wrap_many", wrap_others)
    with pytest.raises(KmsResponseInvalidError, match="does not unwrap to the secret"):
        keytools.wrap_hash_key("p", "pii")
