import json
import os
import stat
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from parquet_keytools import Keytools
from parquet_keytools.rotation import rekeying
from parquet_keytools.storage.local_files import temporary_name

KINDS = pytest.mark.parametrize(
    "settings",
    [{}, {"plaintext_footer": True}, {"key_material": "external"}, {"double_wrapping": False}],
    ids=["encrypted footer", "plaintext footer", "external", "single wrapping"],
)


@KINDS
def test_a_folder_gets_new_data_keys(run, keystore_case, settings) -> None:
    case = keystore_case(**settings)
    before, names = case.digest(), case.names()
    done = run("rekey", case.data, "--config", case.config, "--in-place", "--json")
    assert done.exit_code == 0
    document = json.loads(done.stdout)
    assert document["counts"] == {"rekeyed": 2} and document["complete"]
    assert [file["path"] for file in document["files"]] == list(map(str, case.files))
    assert "2 files: 2 rekeyed" in done.stderr
    assert case.names() == names
    after = case.digest()
    assert all(before[path] != after[path] for path in before)
    case.read()
    assert run("verify", case.data, "--config", case.config).exit_code == 0


def test_a_leaked_kek_is_not_used_again(run, keystore_case) -> None:
    case = keystore_case()

    def keks() -> set[str]:
        with Keytools.from_yaml(case.config) as keytools:
            return {use.kek_id for file in keytools.key_inventory(case.data) for use in file.uses if use.kek_id}

    before = keks()
    with Keytools.from_yaml(case.config) as keytools:
        # This process has cached the KEKs that it used for writing.
        keytools.write_table(case.table, case.files[0])
        assert keytools.rekey_in_place(case.data).succeeded
    assert len(before) == len(keks()) == 2
    assert not before & keks()


def test_a_single_file_keeps_mode_and_links(run, keystore_case, tmp_path: Path) -> None:
    case = keystore_case()
    case.files[0].chmod(0o640)
    link = tmp_path / "a.parquet"
    link.symlink_to(case.files[0])
    assert run("rekey", link, "--config", case.config, "--in-place").exit_code == 0
    assert link.is_symlink()
    assert stat.S_IMODE(case.files[0].stat().st_mode) == 0o640
    case.read()


def test_a_link_with_another_name_is_refused_where_names_matter(run, keystore_case, tmp_path: Path) -> None:
    case = keystore_case(key_material="external")
    link = tmp_path / "a.parquet"
    link.symlink_to(case.files[0])
    beside = f"_KEY_MATERIAL_FOR_{link.name}.json"
    (tmp_path / beside).symlink_to(case.files[0].with_name(beside))
    before = case.digest()
    done = run("rekey", link, "--config", case.config, "--in-place")
    assert done.exit_code == 2
    assert "is a link" in done.stderr
    assert case.digest() == before


def test_it_follows_another_table_where_one_is_named(run, keystore_case) -> None:
    case = keystore_case('  signed: {footer_key: times, plaintext_footer: true, column_keys: {times: ["*"]}}\n')
    done = run(
        "rekey", case.data, "--config", case.config, "--table", "people", "--to-table", "signed", "--in-place"
    )
    assert done.exit_code == 0, done.stderr
    assert case.files[0].read_bytes()[:4] == b"PAR1"
    for name in ("footer", "pii"):
        case.keystore.set_enabled(name, False)
    with Keytools.from_yaml(case.config) as keytools:
        assert keytools.read_table(case.files[0], table_name="signed").equals(case.table)


@pytest.mark.parametrize(
    ("weaker", "lost"),
    [
        ("{footer_key: footer, unlisted_columns: plaintext, also_trusted: [pii]}", "name"),
        (
            "{footer_key: footer, column_keys: {pii: [name]}, plaintext_columns: [id], plaintext_footer: true}",
            "the footer",
        ),
    ],
)
def test_nothing_encrypted_comes_to_lie_in_plaintext(run, keystore_case, weaker: str, lost: str) -> None:
    case = keystore_case()
    config = case.config.with_name("weaker.yaml")
    config.write_text(case.config.read_text().partition("tables:")[0] + f"tables:\n  people: {weaker}\n")
    before = case.digest()
    done = run("rekey", case.data, "--config", config, "--in-place")
    assert done.exit_code == 1
    assert f"in plaintext in the table 'people': {lost}." in done.stderr
    assert case.digest() == before
    # The option is explicit consent.
    config.write_text(config.read_text() + f"  open: {weaker}\n")
    arguments = ["--config", config, "--table", "people", "--to-table", "open", "--in-place"]
    assert run("rekey", case.data, *arguments).exit_code == 0


def test_a_file_keeps_its_aad_prefix(run, keystore_case, tmp_path: Path) -> None:
    case = keystore_case(aad_prefix="place", store_aad_prefix=False)
    config = tmp_path / "without.yaml"
    config.write_text(
        case.config.read_text().replace('"aad_prefix": "place", "store_aad_prefix": false', '"a": 1')
    )
    config.write_text(config.read_text().replace(', "a": 1', ""))
    assert run("rekey", case.data, "--config", config, "--in-place").exit_code == 1
    done = run("rekey", case.data, "--config", config, "--in-place", "--aad-prefix", "place")
    assert done.exit_code == 0, done.stderr
    case.read()
    with Keytools.from_yaml(config) as keytools:
        assert keytools.read_table(case.files[0], aad_prefix="place").equals(case.table)


def test_failures_are_collected(run, keystore_case, table: pa.Table) -> None:
    case = keystore_case()
    case.files[0].write_bytes(b"PAR1, and no more")
    pq.write_table(table, case.data / "plain.parquet")
    done = run("rekey", case.data, "--config", case.config, "--in-place", "--json")
    assert done.exit_code == 1
    document = json.loads(done.stdout)
    assert document["counts"] == {"not encrypted": 1, "failed": 1, "rekeyed": 1}
    assert "a.parquet" in done.stderr
    assert pq.read_table(case.data / "plain.parquet").equals(table)
    done = run("rekey", case.data / "plain.parquet", "--config", case.config, "--in-place")
    assert done.exit_code == 2
    assert "is not encrypted" in done.stderr


def test_a_kms_that_refuses_is_3_and_changes_nothing(run, keystore_case) -> None:
    case = keystore_case()
    case.keystore.set_enabled("pii", False)
    before = case.digest()
    assert run("rekey", case.data, "--config", case.config, "--in-place").exit_code == 3
    assert run("rekey", case.files[0], "--config", case.config, "--in-place").exit_code == 3
    assert case.digest() == before


def test_an_altered_page_changes_nothing(run, keystore_case) -> None:
    case = keystore_case(unlisted_columns="footer_key")
    content = bytearray(case.files[0].read_bytes())
    # In the first module: after the magic, its length and its nonce.
    content[4 + 4 + 12] ^= 1
    case.files[0].write_bytes(content)
    before = case.digest()
    done = run("rekey", case.files[0], "--config", case.config, "--in-place")
    assert done.exit_code == 1
    assert case.digest() == before


def test_an_interrupted_run_starts_over(run, keystore_case, monkeypatch) -> None:
    """Nothing shows which files have new keys, and after another leak all of them need new ones."""
    case = keystore_case()
    original = rekeying.check_rekeyed

    def check_rekeyed(written, *arguments, **options):
        if "b.parquet" in written.path:
            raise KeyboardInterrupt
        return original(written, *arguments, **options)

    arguments = ["rekey", case.data, "--config", case.config, "--in-place", "--json"]
    monkeypatch.setattr(rekeying, "check_rekeyed", check_rekeyed)
    before = case.digest()
    done = run(*arguments)
    assert done.exit_code == 130
    assert "Before this: 1 file: 1 rekeyed. Repeat the command: it starts with the first" in done.stderr
    monkeypatch.undo()
    between = case.digest()
    assert [path for path in before if before[path] != between[path]] == [str(case.files[0])]
    case.read()
    assert json.loads(run(*arguments).stdout)["counts"] == {"rekeyed": 2}
    after = case.digest()
    assert after.keys() == before.keys() and all(after[path] != between[path] for path in between)
    case.read()


def test_a_data_key_that_stays_is_told(run, table: pa.Table, tmp_path: Path) -> None:
    old = "data_keys: {own: MDEyMzQ1Njc4OTAxMjM0NQ==}\n"
    tables = "tables: {t: {footer_key: own, column_keys: {own: [name]}, unlisted_columns: plaintext}}\n"
    config, new_config, path = tmp_path / "old.yaml", tmp_path / "new.yaml", tmp_path / "x.parquet"
    config.write_text(f"version: 1\n{old}{tables}")
    new_config.write_text(f"version: 1\n{old}{tables}".replace("own", "new").replace("MDEy", "NDU2"))
    with Keytools.from_yaml(config) as keytools:
        keytools.write_table(table, path)
    before = path.read_bytes()
    done = run("rekey", path, "--config", config, "--in-place")
    assert done.exit_code == 2
    assert "has the data key 'own' already, and would keep it." in " ".join(done.stderr.split())
    assert path.read_bytes() == before
    assert run("rekey", path, "--config", config, "--to-config", new_config, "--in-place").exit_code == 0
    with Keytools.from_yaml(new_config) as keytools:
        assert keytools.read_table(path).equals(table)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "or --in-place"),
        (["DST", "--in-place"], "DST and --in-place contradict each other"),
        (["--in-place", "--overwrite"], "this does not work with --in-place"),
        (["DST", "--follow-links"], "this works with --in-place only"),
        (["--in-place", "--skip-existing"], "this does not work with --in-place"),
        (["--in-place", "--table", "peple"], "Did you mean 'people'?"),
        (["--in-place", "--to-table", "peple"], "Did you mean 'people'?"),
    ],
)
def test_mistakes_change_nothing(run, keystore_case, arguments: list[str], text: str) -> None:
    case = keystore_case()
    before = case.digest()
    done = run("rekey", case.data, "--config", case.config, *arguments)
    assert done.exit_code == 2
    assert text in " ".join(done.stderr.split())
    assert case.digest() == before
    assert not Path("DST").exists()


def test_nothing_is_left_over(run, keystore_case) -> None:
    case = keystore_case()
    for path in case.files:
        path.with_name(temporary_name(path.name)).write_bytes(b"half of it")
    assert run("rekey", case.data, "--config", case.config, "--in-place").exit_code == 0
    assert case.names() == ["a.parquet", "b.parquet"]
    assert os.access(case.files[0], os.R_OK)
