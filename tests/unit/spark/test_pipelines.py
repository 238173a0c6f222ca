"""Pipelines, as far as they work without Spark: their tasks run here, one after the other."""

from __future__ import annotations

import base64
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_spark import FakeSpark

from parquet_keytools import Keytools
from parquet_keytools.errors import (
    ConfigurationError,
    KmsAccessDeniedError,
    KmsUnavailableError,
    OutputError,
    ParquetFormatError,
)
from parquet_keytools.kms.client import KmsClient, KmsSettings
from parquet_keytools.kms.in_memory import InMemoryKms
from parquet_keytools.kms.remote_client import RemoteKmsSettings
from parquet_keytools.secret_bytes import SecretBytes
from parquet_keytools.spark import map_files, pipelines

KEYS = {
    name: base64.b64encode(bytes([number]) * 32).decode() for number, name in enumerate(("footer", "pii", "new"))
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration of one table, in a file."""
    path = tmp_path / "config.yaml"
    path.write_text(
        f"version: 1\nkms: {{type: in_memory, keys: {KEYS}}}\n"
        "tables: {t: {footer_key: footer, column_keys: {pii: [a]}, unlisted_columns: plaintext}}\n"
    )
    return path


@pytest.fixture
def encrypted(tmp_path: Path, config: Path) -> tuple[Keytools, Path]:
    """The configuration, and a folder with an encrypted file."""
    keytools = Keytools.from_yaml(config)
    (tmp_path / "data").mkdir()
    keytools.write_table(pa.table({"a": [1, 2, 3], "b": [4, 5, 6]}), tmp_path / "data" / "part-0.parquet")
    return keytools, tmp_path / "data"


def write_plain(folder: Path, name: str = "part-0.parquet") -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"a": [1, 2, 3], "ab": [4, 5, 6]}), folder / name)
    return folder


def no_spark(cores: int = 2, **options: Any) -> Any:
    return FakeSpark(cores, **options)


# --- files, tasks and limits ---


def test_all_that_lies_in_a_folder_has_a_row(tmp_path: Path, config: Path) -> None:
    source = tmp_path / "source"
    for name in ("x=1/a.parquet", "x=1/b.parquet", "c.parquet"):
        write_plain(source, name)
    orphan = "_KEY_MATERIAL_FOR_a.parquet.json"
    for name in ("_metadata", ".hidden", "notes.txt", orphan, f"x=1/{orphan}", "_SUCCESS"):
        (source / name).write_bytes(b"12345")
    (source / "x=1" / "loop").symlink_to(source)
    report = pipelines.encrypt(no_spark(), source, tmp_path / "target", config)
    rows = {row["path"].removeprefix(f"{source}/"): row for row in report.rows()}
    assert {name for name, row in rows.items() if row["outcome"] == "encrypted"} == {
        "x=1/a.parquet",
        "x=1/b.parquet",
        "c.parquet",
    }
    # Key material belongs to its Parquet file; without one, it has a row.
    left_out = {name for name, row in rows.items() if row["outcome"] == "skipped"}
    assert left_out == {"_metadata", ".hidden", "notes.txt", orphan}
    assert "statistics in plaintext" in rows["_metadata"]["detail"]
    (failed,) = report.failures()
    assert failed["path"] == str(source / "x=1" / "loop")
    # A file may be missing.
    assert not (tmp_path / "target" / "_SUCCESS").exists()
    assert pipelines.encrypt(no_spark(), source / "c.parquet", tmp_path / "c.parquet", config).succeeded
    with pytest.raises(FileNotFoundError):
        pipelines.encrypt(no_spark(), tmp_path / "nowhere", tmp_path / "other", config)


@pytest.mark.parametrize(
    ("files", "cores", "max_tasks", "tasks"),
    [(3, 2, None, 3), (40, 2, None, 16), (40, 8, None, 40), (40, 8, 5, 5)],
)
def test_tasks_have_every_file_once(
    encrypted: tuple[Keytools, Path], config: Path, files: int, cores: int, max_tasks: int | None, tasks: int
) -> None:
    _, folder = encrypted
    for number in range(1, files):
        os.link(folder / "part-0.parquet", folder / f"part-{number}.parquet")
    spark = no_spark(cores)
    report = pipelines.keys(spark, folder, config, max_tasks=max_tasks)
    assert spark.partitions == [tasks] and report.tasks == tasks
    assert Counter(row["path"] for row in report.rows()) == Counter(map(str, folder.iterdir()))
    assert spark.descriptions == [f"parquet-keytools: list the keys of {folder}"]


def noted_settings(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> list[RemoteKmsSettings]:
    """Return the settings of the KMS clients that tasks created in a call."""
    noted: list[RemoteKmsSettings] = []
    make_client = map_files.make_client

    def make(settings: KmsSettings, folder: Path) -> KmsClient:
        assert isinstance(settings, RemoteKmsSettings)
        noted.append(settings)
        return make_client(settings, folder)

    with monkeypatch.context() as patch:
        patch.setattr(map_files, "make_client", make)
        call()
    return noted


AWS = "version: 1\nkms: {{type: aws, region: eu-west-1, {}}}\n"


@pytest.mark.parametrize(
    ("limit", "speculation", "tasks", "share"),
    [
        ("max_concurrent_calls: 4", "false", 4, (None, 1)),
        ("max_concurrent_calls: 4", "TRUE", 2, (None, 1)),
        ("max_calls_per_second: 40", "false", 8, (5, 4)),
        ("max_calls_per_second: 40, max_concurrent_calls: 64", "true", 8, (2.5, 4)),
        ("timeout_seconds: 20", "false", 20, (None, 4)),
    ],
)
def test_tasks_share_the_limits_of_the_kms(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    speculation: str,
    tasks: int,
    share: tuple[float | None, int],
) -> None:
    for number in range(20):
        write_plain(tmp_path / "data", f"part-{number}.parquet")
    config = tmp_path / "aws.yaml"
    config.write_text(AWS.format(limit))
    # Plaintext files need no key.
    spark = no_spark(8, spark_speculation=speculation)
    (settings,) = noted_settings(monkeypatch, lambda: pipelines.keys(spark, tmp_path / "data", config))
    assert spark.partitions == [tasks]
    assert (settings.max_calls_per_second, settings.max_concurrent_calls) == share


def test_calls_that_wait_for_their_turn_have_not_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_plain(tmp_path / "data")
    write_plain(tmp_path / "data", "part-1.parquet")
    config = tmp_path / "aws.yaml"
    config.write_text(AWS.format("max_calls_per_second: 0.5, timeout_seconds: 20"))
    (settings,) = noted_settings(monkeypatch, lambda: pipelines.keys(no_spark(2), tmp_path / "data", config))
    assert (settings.max_calls_per_second, settings.timeout_seconds) == (0.25, 80)


def with_vault(tmp_path: Path) -> Path:
    """Return a configuration whose KMS is unreachable."""
    config = tmp_path / "vault.yaml"
    config.write_text(
        "version: 1\nkms: {type: vault, url: 'http://127.0.0.1:9', token: canary-token, timeout_seconds: 1}\n"
        "tables: {t: {footer_key: footer, column_keys: {pii: [a]}, unlisted_columns: footer_key}}\n"
    )
    return config


def test_with_the_kms_down_no_job_starts(tmp_path: Path) -> None:
    for number in range(5):
        write_plain(tmp_path / "data", f"part-{number}.parquet")
    spark = no_spark()
    with pytest.raises(KmsUnavailableError) as caught:
        pipelines.encrypt(spark, tmp_path / "data", tmp_path / "target", with_vault(tmp_path))
    assert "canary" not in str(caught.value)
    assert spark.partitions == [] and not (tmp_path / "target").exists()


@pytest.mark.parametrize("name", ["decrypt", "rotate", "rekey", "keys", "verify"])
def test_with_the_kms_down_no_job_reads(
    encrypted: tuple[Keytools, Path], config: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> SecretBytes:
        raise KmsUnavailableError("gone")

    monkeypatch.setattr(InMemoryKms, "_unwrap", fail)
    _, folder = encrypted
    spark = no_spark()
    places = [folder, tmp_path / "target"] if name == "decrypt" else [folder]
    with pytest.raises(KmsUnavailableError):
        getattr(pipelines, name)(spark, *places, config)
    assert spark.partitions == []


def test_a_kms_that_goes_down_ends_the_job(tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the driver's check. One file waits for the KMS, and no other file, in any task."""
    for number in range(40):
        write_plain(tmp_path / "data", f"part-{number:02}.parquet")
    asked: list[str] = []

    class GoneKms(InMemoryKms):
        def _wrap(self, key: SecretBytes, master_key_id: str) -> str:
            asked.append(master_key_id)
            raise KmsUnavailableError("gone")

    monkeypatch.setattr(map_files, "make_client", GoneKms.from_settings)
    spark = no_spark()
    report = pipelines.encrypt(spark, tmp_path / "data", tmp_path / "target", config)
    assert spark.partitions == [16] and report.outcomes == {"failed": 40}
    assert {row["error_class"] for row in report.rows()} == {"KmsUnavailableError"}
    assert sum("not started" in row["error"] for row in report.rows()) == 39
    assert len(asked) == len(set(asked)) <= 2
    assert not (tmp_path / "target" / "_SUCCESS").exists()


def test_a_mistake_of_the_whole_table_is_one_error(tmp_path: Path, config: Path) -> None:
    for number in range(5):
        write_plain(tmp_path / "data", f"part-{number}.parquet")
    config.write_text(config.read_text().replace("[a]", "[person.email]"))
    spark = no_spark()
    with pytest.raises(ConfigurationError, match=r"'person\.email' matches no column"):
        pipelines.encrypt(spark, tmp_path / "data", tmp_path / "target", config)
    assert spark.partitions == [] and not (tmp_path / "target").exists()


def test_a_single_file_that_does_not_fit_its_table_fails_alone(tmp_path: Path, config: Path) -> None:
    write_plain(tmp_path / "data", "part-1.parquet")
    pq.write_table(pa.table({"other": [1]}), tmp_path / "data" / "part-0.parquet")
    report = pipelines.encrypt(no_spark(), tmp_path / "data", tmp_path / "target", config)
    (failed,) = report.failures()
    assert failed["path"].endswith("part-0.parquet") and report.outcomes["encrypted"] == 1


def test_a_refused_key_is_one_error_that_does_not_speak_of_reading(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plain(tmp_path / "data")

    def deny(*_: object) -> str:
        raise KmsAccessDeniedError

    monkeypatch.setattr(InMemoryKms, "_wrap", deny)
    spark = no_spark()
    with pytest.raises(KmsAccessDeniedError, match=r"'footer': access denied\. Ask for the permission\.$"):
        pipelines.encrypt(spark, tmp_path / "data", tmp_path / "target", config)
    assert spark.partitions == []


def test_places_are_the_same_on_every_node(
    tmp_path: Path, config: Path, encrypted: tuple[Keytools, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (row,) = pipelines.keys(no_spark(), "data", config).rows()
    assert row["path"] == str(tmp_path / "data" / "part-0.parquet")
    with pytest.raises(ConfigurationError, match="credentials in the URI") as raised:
        pipelines.keys(no_spark(), "s3a://AKIA:canary@bucket/flights", config)
    assert "canary" not in str(raised.value)
    with pytest.raises(ConfigurationError, match="scheme 'ftp'"):
        pipelines.keys(no_spark(), "ftp://host/x", config)


@pytest.mark.parametrize("name", ["rotate", "rekey", "keys", "verify"])
def test_a_file_with_a_name_that_is_not_utf_8_is_not_passed_over(
    encrypted: tuple[Keytools, Path], config: Path, name: str
) -> None:
    _, folder = encrypted
    os.link(os.fsencode(folder) + b"/part-0.parquet", os.fsencode(folder) + b"/\xff.parquet")
    report = getattr(pipelines, name)(no_spark(), folder, config)
    assert not report.succeeded
    (row,) = [row for row in report.rows() if row["error"] is not None]
    assert "not valid UTF-8" in row["error"] and row["path"].endswith("\\xff.parquet")
    assert sum(report.outcomes.values()) == 2


# --- encrypt ---


def test_a_call_that_is_refused_leaves_a_complete_target_complete(config: Path, tmp_path: Path) -> None:
    source, target, empty = write_plain(tmp_path / "source"), tmp_path / "target", tmp_path / "empty"
    assert pipelines.encrypt(no_spark(), source, target, config).succeeded
    empty.mkdir()
    with pytest.raises(ParquetFormatError, match="no Parquet files"):
        pipelines.encrypt(no_spark(), empty, target, config, overwrite=True)
    with pytest.raises(OutputError, match="is not empty"):
        pipelines.encrypt(no_spark(), source, target, config)
    assert {path.name for path in target.iterdir()} == {"_SUCCESS", "part-0.parquet"}


def test_a_run_is_continued_where_files_are_there(config: Path, tmp_path: Path) -> None:
    source, target = write_plain(tmp_path / "source"), tmp_path / "target"
    damaged = write_plain(source, "x/part-1.parquet") / "x/part-1.parquet"
    good = damaged.read_bytes()
    damaged.write_bytes(good[:-1])
    report = pipelines.encrypt(no_spark(), source, target, config)
    assert report.outcomes == {"encrypted": 1, "failed": 1}
    (row,) = report.failures()
    assert row["path"] == str(damaged) and not (target / "_SUCCESS").exists()
    before = (target / "part-0.parquet").read_bytes()
    damaged.write_bytes(good)
    with pytest.raises(OutputError, match="--skip-existing"):
        pipelines.encrypt(no_spark(), source, target, config)
    report = pipelines.encrypt(no_spark(), source, target, config, skip_existing=True)
    assert report.succeeded and report.outcomes == {"finished before": 1, "encrypted": 1}
    assert (target / "part-0.parquet").read_bytes() == before and (target / "_SUCCESS").exists()
    assert Keytools.from_yaml(config).read_table(target)["a"].to_pylist() == [1, 2, 3] * 2


@pytest.mark.parametrize("forgery", ["plaintext", "of the table"])
def test_a_file_that_was_put_in_place_of_a_finished_one_is_not_skipped(
    config: Path, tmp_path: Path, forgery: str
) -> None:
    source, target = write_plain(tmp_path / "source"), tmp_path / "target"
    target.mkdir()
    forged = pa.table({"a": [0, 0, 0], "ab": [0, 0, 0]})
    if forgery == "plaintext":
        pq.write_table(forged, target / "part-0.parquet")
    else:
        Keytools.from_yaml(config).write_table(forged, target / "part-0.parquet")
    before = (target / "part-0.parquet").read_bytes()
    report = pipelines.encrypt(no_spark(), source, target, config, skip_existing=True)
    (row,) = report.failures()
    assert "exists already" in row["error"] and str(target / "part-0.parquet") in row["error"]
    assert (target / "part-0.parquet").read_bytes() == before and not (target / "_SUCCESS").exists()
    report = pipelines.encrypt(no_spark(), source, target, config, skip_existing=True, overwrite=True)
    assert report.outcomes == {"encrypted": 1}
    assert Keytools.from_yaml(config).read_table(target)["a"].to_pylist() == [1, 2, 3]


def test_values_of_a_column_with_a_key_do_not_stay_in_the_names_of_folders(config: Path, tmp_path: Path) -> None:
    source = write_plain(tmp_path / "source", "x=1/a%20c=canary/part-0.parquet")
    text = config.read_text()
    config.write_text(text.replace("[a]", '["a*"]'))
    with pytest.raises(ConfigurationError, match=r"'a c' are in the names of folders.*under the key 'pii'"):
        pipelines.encrypt(no_spark(), source, tmp_path / "target", config)
    assert not (tmp_path / "target").exists()
    config.write_text(text.replace("unlisted_columns: plaintext", "unlisted_columns: footer_key"))
    with pytest.warns(UserWarning, match="are in the names of folders"):
        assert pipelines.encrypt(no_spark(), source, tmp_path / "target", config).succeeded


# --- decrypt ---


def test_decrypt_gives_back_what_was_encrypted(config: Path, tmp_path: Path) -> None:
    source, target, back = tmp_path / "source", tmp_path / "target", tmp_path / "back"
    for number in range(5):
        write_plain(source, f"x={number % 2}/part-{number}.parquet")
    assert pipelines.encrypt(no_spark(), source, target, config).succeeded
    report = pipelines.decrypt(no_spark(), target, back, config)
    assert report.succeeded and report.outcomes == {"decrypted": 5}
    for path in sorted(source.rglob("*.parquet")):
        assert pq.read_table(back / path.relative_to(source)).equals(pq.read_table(path))
    assert (back / "_SUCCESS").exists()
    with pytest.raises(OutputError, match="is not empty"):
        pipelines.decrypt(no_spark(), target, back, config)
    (back / "x=0" / "part-0.parquet").unlink()
    report = pipelines.decrypt(no_spark(1, attempts=3), target, back, config, skip_existing=True)
    assert report.succeeded and set(report.outcomes) <= {"finished before", "decrypted"}
    assert len(list(back.rglob("*.parquet"))) == 5


@pytest.mark.parametrize("allowed", [False, True])
def test_a_copy_of_a_file_is_not_decrypted_twice(
    encrypted: tuple[Keytools, Path], config: Path, tmp_path: Path, allowed: bool
) -> None:
    keytools, folder = encrypted
    keytools.write_table(pa.table({"a": [7], "b": [8]}), folder / "part-1.parquet")
    (folder / "part-2.parquet").write_bytes((folder / "part-0.parquet").read_bytes())
    (folder / "part-3.parquet").symlink_to(folder / "part-1.parquet")
    if allowed:
        config.write_text(config.read_text() + "reading: {reused_encryption_properties: allow}\n")
    report = pipelines.decrypt(no_spark(), folder, tmp_path / "back", config)
    if allowed:
        assert report.outcomes == {"decrypted": 4}
        return
    (row,) = report.failures()
    assert report.outcomes == {"decrypted": 3, "failed": 1}
    assert (row["path"], row["error_class"]) == (str(folder / "part-2.parquet"), "ReusedKeysError")
    assert str(folder / "part-0.parquet") in row["error"]
    names = {path.name for path in (tmp_path / "back").iterdir()}
    assert names == {"part-0.parquet", "part-1.parquet", "part-3.parquet"}, "and no _SUCCESS"


def test_a_plaintext_file_is_copied_only_if_that_is_allowed(
    encrypted: tuple[Keytools, Path], config: Path, tmp_path: Path
) -> None:
    _, folder = encrypted
    pq.write_table(pa.table({"a": [1], "b": [2]}), folder / "part-1.parquet")
    report = pipelines.decrypt(no_spark(), folder, tmp_path / "back", config)
    assert report.outcomes == {"decrypted": 1, "failed": 1}
    config.write_text(config.read_text() + "reading: {plaintext_files: allow}\n")
    report = pipelines.decrypt(no_spark(), folder, tmp_path / "back", config, overwrite=True)
    assert report.outcomes == {"decrypted": 1, "copied": 1} and report.succeeded


# --- attempts of one task ---


@pytest.mark.parametrize(
    ("key_material", "options"),
    [("external", {}), ("internal", {"skip_existing": True}), ("external", {"overwrite": True})],
    ids=str,
)
def test_attempts_to_encrypt_the_same_files_all_end_well(
    config: Path, tmp_path: Path, key_material: str, options: dict[str, bool]
) -> None:
    config.write_text(config.read_text().replace("[a]}", f"[a]}}, key_material: {key_material}"))
    source, target = tmp_path / "source", tmp_path / "target"
    for number in range(8):
        write_plain(source, f"x={number % 2}/part-{number}.parquet")
    report = pipelines.encrypt(no_spark(1, attempts=4), source, target, config, **options)
    assert report.succeeded, list(report.failures())
    assert all(row["keys"] for row in report.rows() if row["outcome"] == "encrypted")
    assert Keytools.from_yaml(config).read_table(target).num_rows == 8 * 3
    assert len(list(target.rglob("*.parquet"))) == 8
    assert not [path for path in target.rglob(".*") if path.is_file()]


def test_attempts_to_rekey_the_same_files_all_end_well(encrypted: tuple[Keytools, Path], config: Path) -> None:
    keytools, folder = encrypted
    before = (folder / "part-0.parquet").read_bytes()
    report = pipelines.rekey(no_spark(1, attempts=3), folder, config)
    assert report.succeeded, list(report.failures())
    assert (folder / "part-0.parquet").read_bytes() != before
    assert keytools.read_table(folder)["a"].to_pylist() == [1, 2, 3]
    assert [path.name for path in folder.iterdir()] == ["part-0.parquet"]


# --- rotate and rekey ---


def test_the_driver_has_each_distinct_wrapped_key_rewrapped_once(
    encrypted: tuple[Keytools, Path], config: Path
) -> None:
    keytools, folder = encrypted
    for number in range(1, 6):
        keytools.write_table(pa.table({"a": [number], "b": [number]}), folder / f"part-{number}.parquet")
    pq.write_table(pa.table({"a": [1]}), folder / "plain.parquet")
    dry = pipelines.rotate(no_spark(), folder, config, moves={"pii": "new"}, dry_run=True)
    assert dry.outcomes == {"would rotate": 6, "nothing to rotate": 1} and "rewrap" not in dry.kms_keys
    spark = no_spark()
    report = pipelines.rotate(spark, folder, config, moves={"pii": "new"})
    assert report.outcomes == {"rotated": 6, "nothing to rotate": 1}
    assert report.kms_keys["rewrap"] == 1
    # Only files with keys to rotate are opened again.
    assert spark.partitions == [7, 6]
    again = no_spark()
    assert pipelines.rotate(again, folder, config, moves={"pii": "new"}).outcomes == {"nothing to rotate": 7}
    assert again.partitions == [7]
    assert {use.master_key_id for file in keytools.key_inventory(folder) for use in file.uses} == {"footer", "new"}


def test_a_key_that_the_kms_refuses_fails_its_file_alone(encrypted: tuple[Keytools, Path], config: Path) -> None:
    keytools, folder = encrypted
    other = folder.with_name("other.yaml")
    other.write_text(config.read_text().replace(KEYS["pii"], base64.b64encode(b"other".ljust(32)).decode()))
    Keytools.from_yaml(other).write_table(pa.table({"a": [7], "b": [8]}), folder / "part-1.parquet")
    before = (folder / "part-1.parquet").read_bytes()
    report = pipelines.rotate(no_spark(), folder, config, moves={"pii": "new"})
    assert report.outcomes == {"rotated": 1, "failed": 1}
    (row,) = report.failures()
    assert row["path"] == str(folder / "part-1.parquet") and "pii" in row["error"]
    assert (folder / "part-1.parquet").read_bytes() == before
    assert {use.master_key_id for use in next(keytools.key_inventory(folder)).uses} == {"footer", "new"}


def test_what_the_configuration_says_of_rotations_holds(encrypted: tuple[Keytools, Path], config: Path) -> None:
    _, folder = encrypted
    config.write_text(config.read_text() + "rotation: {moves: {pii: new}}\n")
    (row,) = pipelines.rotate(no_spark(), folder, config).rows()
    assert [(key["master_key"], key["new_master_key"]) for key in row["keys"]] == [("pii", "new")]
    # Arguments take precedence.
    (row,) = pipelines.rotate(no_spark(), folder, config, moves={"footer": "new"}).rows()
    assert [(key["master_key"], key["new_master_key"]) for key in row["keys"]] == [("footer", "new")]
    assert [path.name for path in folder.iterdir()] == ["part-0.parquet"]
    config.write_text(config.read_text().replace("pii: new", "pii: nwe"))
    with pytest.raises(ConfigurationError, match=r"rotation\.moves\.pii"):
        pipelines.rotate(no_spark(), folder, config)


def test_a_plaintext_file_in_a_folder_is_not_rekeyed(encrypted: tuple[Keytools, Path], config: Path) -> None:
    _, folder = encrypted
    pq.write_table(pa.table({"a": [1]}), folder / "plain.parquet")
    report = pipelines.rekey(no_spark(), folder, config)
    assert report.outcomes == {"rekeyed": 1, "not encrypted": 1}
    (row,) = [row for row in report.rows() if row["outcome"] == "rekeyed"]
    assert {key["master_key"]: key["number"] for key in row["keys"]} == {"footer": 1, "pii": 1}
    assert pipelines.rekey(no_spark(), folder / "plain.parquet", config).outcomes == {"failed": 1}


# --- verify ---


def test_a_plaintext_file_beside_encrypted_ones_is_named(encrypted: tuple[Keytools, Path], config: Path) -> None:
    _, folder = encrypted
    pq.write_table(pa.table({"a": [1], "b": [2]}), folder / "part-1.parquet")
    report = pipelines.verify(no_spark(), folder, config)
    assert not report.succeeded
    broken = {row["rule"]: row for row in report.rule_rows() if row["outcome"] == "broken"}
    assert broken["encrypted"]["file"] == str(folder / "part-1.parquet")
    assert broken["plaintext-among"]["message"] == "part-1.parquet is not encrypted."


def test_files_of_different_tasks_are_compared(encrypted: tuple[Keytools, Path], config: Path) -> None:
    _, folder = encrypted
    (folder / "part-1.parquet").write_bytes((folder / "part-0.parquet").read_bytes())
    spark = no_spark()
    report = pipelines.verify(spark, folder, config)
    assert spark.partitions == [2, 2], "the nonces of files that share a DEK are read in a second pass"
    broken = {row["rule"] for row in report.rule_rows() if row["outcome"] == "broken"}
    assert {"file-copied", "dek-shared"} <= broken and not report.succeeded


# --- several KMSs ---


def test_pipelines_with_several_kmss(tmp_path: Path) -> None:
    config = tmp_path / "several.yaml"
    kms = f"{{type: in_memory, keys: {KEYS}}}"
    config.write_text(
        f"version: 1\nkms:\n  eu: {kms}\n  us: {kms}\n"
        "master_keys: {footer: {kms: eu, id: footer}, pii: {kms: us, id: pii}, new: {kms: us, id: new}}\n"
        "tables: {t: {footer_key: footer, column_keys: {pii: [a]}, unlisted_columns: plaintext}}\n"
        "rotation: {moves: {footer: new}}\n"
    )
    source, target = write_plain(tmp_path / "source"), tmp_path / "target"
    assert pipelines.encrypt(no_spark(), source, target, config).succeeded

    def master_keys() -> set[str]:
        report = pipelines.keys(no_spark(), target, config)
        assert report.succeeded
        (row,) = report.rows()
        return {key["master_key"] for key in row["keys"]}

    assert master_keys() == {"eu::footer", "us::pii"}
    report = pipelines.rotate(no_spark(), target, config, moves={"footer": "new"})
    assert report.outcomes == {"rotated": 1}
    assert master_keys() == {"us::new", "us::pii"}
    assert b'"kmsInstanceID":"us"' in (target / "part-0.parquet").read_bytes()
    assert pipelines.verify(no_spark(), target, config).succeeded
    assert pipelines.decrypt(no_spark(), target, tmp_path / "plain", config).succeeded
