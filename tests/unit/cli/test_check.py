import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from parquet_keytools import Keytools
from parquet_keytools.config.settings import configuration_json_schema
from parquet_keytools.kms.in_memory import InMemoryKms

NO_LABEL = {"class_name": None, "label_place": None}


def no_kms(*_: object) -> None:
    raise AssertionError("the KMS was made")


def test_every_master_key_named_is_tried(run, config: Path) -> None:
    config.write_text(config.read_text() + "master_keys: {spare: times}\n")
    done = run("check", config, "--json")
    assert done.exit_code == 0
    answer = json.loads(done.stdout)
    assert [(key["name"], key["master_key_id"], key["outcome"]) for key in answer["master_keys"]] == [
        ("footer", "footer", "ok"),
        ("pii", "pii", "ok"),
        ("spare", "times", "ok"),
    ]
    assert {key["backend"] for key in answer["master_keys"]} == {"in_memory"}
    assert answer["columns"] is None
    assert "no mistakes" in done.stderr


def test_the_answer_goes_to_stdout(run, config: Path) -> None:
    done = run("check", config)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "in_memory" in done.stdout and "no mistakes" in done.stdout


def test_a_refused_master_key_is_3_after_all_are_shown(run, config: Path, deny) -> None:
    deny("footer")
    done = run("check", config, "--json")
    assert done.exit_code == 3
    footer, pii = json.loads(done.stdout)["master_keys"]
    assert (footer["outcome"], footer["error"], footer["version"]) == ("failed", "KmsAccessDeniedError", None)
    assert footer["message"] in " ".join(done.stderr.split())
    assert pii["outcome"] == "ok"
    assert "no mistakes" not in done.stderr


def test_a_master_key_that_only_wraps_is_3(run, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InMemoryKms, "_unwrap", no_kms)
    done = run("check", config, "--json")
    assert done.exit_code == 3
    assert {key["error"] for key in json.loads(done.stdout)["master_keys"]} == {"KmsResponseInvalidError"}


def test_a_master_key_that_unwraps_another_key_is_3(run, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from parquet_keytools.secret_bytes import SecretBytes

    monkeypatch.setattr(InMemoryKms, "_unwrap", lambda *_: SecretBytes(bytes(16)))
    done = run("check", config, "--json")
    assert done.exit_code == 3
    assert "a different key" in json.loads(done.stdout)["master_keys"][0]["message"]


def test_an_unknown_master_key_is_a_wrong_configuration(run, config: Path) -> None:
    config.write_text(config.read_text().replace("{pii: [name]}", "{pi: [name]}"))
    done = run("check", config)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Did you mean 'pii'?" in done.stderr


def test_offline_asks_the_kms_nothing(run, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InMemoryKms, "from_settings", no_kms)
    done = run("check", config, "--offline", "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["master_keys"] is None


def test_a_configuration_with_data_keys_alone(run, tmp_path: Path, plain: Path) -> None:
    config = tmp_path / "data_keys.yaml"
    config.write_text(
        "version: 1\ndata_keys: {kf: MDEyMzQ1Njc4OTAxMjM0NQ==}\n"
        "tables: {people: {footer_key: kf, unlisted_columns: footer_key}}\n"
    )
    done = run("check", config, "--json", "--against", plain)
    assert done.exit_code == 0
    answer = json.loads(done.stdout)
    assert answer["master_keys"] is None
    assert answer["columns"][0] == {
        "dotted_path": "id",
        "kind": "footer_key",
        "key_name": "kf",
        "master_key_id": None,
        **NO_LABEL,
    }


@pytest.mark.parametrize("footer", ["plaintext file", "plaintext footer", "encrypted footer"])
def test_against_a_file(run, config: Path, tmp_path: Path, footer: str, table: pa.Table) -> None:
    text = config.read_text()
    path = tmp_path / "file.parquet"
    if footer == "plaintext file":
        pq.write_table(table, path)
    else:
        writer = tmp_path / "writer.yaml"
        # The prefix differs from the checked configuration: the schema is readable nevertheless.
        more = "    aad_prefix: other\n" + ("    plaintext_footer: true\n" if footer == "plaintext footer" else "")
        writer.write_text(text + more)
        Keytools.from_yaml(writer).write_table(table, path)
    config.write_text(text + "    aad_prefix: mine\n")
    done = run("check", config, "--against", path, "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["columns"] == [
        {"dotted_path": "id", "kind": "plaintext", "key_name": None, "master_key_id": None, **NO_LABEL},
        {"dotted_path": "name", "kind": "column_key", "key_name": "pii", "master_key_id": "pii", **NO_LABEL},
    ]
    assert "column_key" in done.stderr
    assert "In plaintext: 1 column: id\n" in run("check", config, "--against", path).stdout
    offline = run("check", config, "--against", path, "--offline")
    if footer == "encrypted footer":
        assert offline.exit_code == 2
        assert "Leave out --offline" in offline.stderr
    else:
        assert offline.exit_code == 0


def test_against_a_file_whose_prefix_is_not_stored(run, config: Path, tmp_path: Path, table: pa.Table) -> None:
    writer = tmp_path / "writer.yaml"
    writer.write_text(config.read_text() + "    aad_prefix: secret place\n    store_aad_prefix: false\n")
    path = tmp_path / "file.parquet"
    Keytools.from_yaml(writer).write_table(table, path)
    assert run("check", config, "--against", path).exit_code == 1
    assert run("check", config, "--against", path, "--aad-prefix", "secret place").exit_code == 0
    assert run("check", writer, "--against", path).exit_code == 0


def test_against_a_file_that_the_patterns_do_not_fit(run, config: Path, plain: Path) -> None:
    config.write_text(config.read_text().replace("[name]", "[nme]"))
    done = run("check", config, "--against", plain)
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"Error: {config}:8: tables.people.column_keys.pii[0]: 'nme' matches no column." in done.stderr
    assert "Did you mean 'name'?" in done.stderr


@pytest.mark.parametrize("content", [None, b"no Parquet file"])
def test_against_what_is_no_parquet_file(run, config: Path, tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "file.parquet"
    if content is not None:
        path.write_bytes(content)
    done = run("check", config, "--against", path)
    assert (done.exit_code, done.stdout) == (2 if content is None else 1, "")
    assert str(path) in done.stderr


def test_an_unknown_table_is_a_wrong_configuration(run, config: Path) -> None:
    done = run("check", config, "--offline", "--table", "peple")
    assert done.exit_code == 2
    assert "Did you mean 'people'?" in done.stderr


def test_schema_needs_no_configuration(run) -> None:
    done = run("check", "--schema")
    assert done.exit_code == 0
    # Libraries of backends may warn on stderr about their age when they are first imported.
    assert "Error" not in done.stderr
    assert json.loads(done.stdout) == configuration_json_schema()


def test_several_configurations_are_all_checked_and_the_worst_status_counts(
    run, config: Path, tmp_path: Path, deny
) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("version: 1\ntables: {people: {footer_kay: footer}}\n")
    done = run("check", config, wrong, tmp_path / "missing.yaml", config)
    assert done.exit_code == 2
    assert done.stdout.count(f"{config}: no mistakes.") == 2
    assert f"Error: {wrong}:2" in done.stderr and "missing.yaml: there is no such file" in done.stderr
    deny("pii")
    refused = run("check", wrong, config, "--json")
    assert refused.exit_code == 3
    first, second = json.loads(refused.stdout)["configurations"]
    assert (first["configuration"], first["error"]) == (str(wrong), "ConfigurationError")
    assert first["message"] in refused.stderr
    assert [key["outcome"] for key in second["master_keys"]] == ["ok", "failed"]


def test_strict_counts_warnings(run, config: Path, tmp_path: Path) -> None:
    config.chmod(0o600)
    assert run("check", config, "--strict").exit_code == 0
    doubtful = tmp_path / "doubtful.yaml"
    doubtful.write_text(config.read_text() + "    algorithm: AES_GCM_CTR_V1\n")
    doubtful.chmod(0o600)
    assert run("check", doubtful).exit_code == 0
    done = run("check", config, doubtful, "--strict")
    assert (done.exit_code, done.stdout.count("no mistakes")) == (1, 1)
    assert f"{doubtful}: 1 warning, which --strict counts as mistakes." in done.stderr


def test_the_same_failure_of_many_keys_is_one_line(run, config: Path, deny) -> None:
    names = [f"key{number}" for number in range(30)]
    config.write_text(
        f"version: 1\nkms: {{type: in_memory, keys: [{', '.join(names)}]}}\n"
        f"master_keys: {{{', '.join(f'{name}: {name}' for name in names)}}}\n"
    )
    deny(*names)
    done = run("check", config)
    assert done.exit_code == 3
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("Failed")]
    assert "30 master keys" in line
