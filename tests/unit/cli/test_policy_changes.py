"""`check --since` and `check --against OLD.yaml`: how a change of labels or keys affects columns."""

import json
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

CONFIGURATION = """\
version: 1
kms: {type: in_memory, keys: [footer, pii, pci]}
classes: {pii: {key: pii}, payment: {key: pci}, public: plaintext}
tables:
  customers:
    footer_key: footer
    labels_from: [csv: labels/customers.csv]
"""


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a configuration in a folder."""
    folder = tmp_path / "repository"
    (folder / "keys" / "labels").mkdir(parents=True)
    (folder / "keys" / "c.yaml").write_text(CONFIGURATION)
    label(folder, id="public", email="pii", card="payment", notes="pii")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "Begin")
    return folder


def label(folder: Path, **labels: str) -> None:
    lines = "".join(f"{column},{name}\n" for column, name in labels.items())
    (folder / "keys" / "labels" / "customers.csv").write_text(f"column,class\n{lines}")


def changes(done) -> dict[str, tuple[str, str, bool]]:
    return {
        change["what"]: (change["before"], change["after"], change["is_weaker"])
        for change in json.loads(done.stdout)["changes"]
    }


def test_labels_that_did_not_change(run, repository: Path) -> None:
    done = run("check", repository / "keys" / "c.yaml", "--since", "HEAD")
    assert done.exit_code == 0 and "No column is protected in another way" in done.stdout


def test_a_removed_and_a_changed_label(run, repository: Path) -> None:
    config = repository / "keys" / "c.yaml"
    label(repository, id="pii", email="public", card="pii", new="public")
    done = run("check", config, "--since", "HEAD", "--json")
    assert done.exit_code == 1
    assert changes(done) == {
        "id": ("plaintext", "pii", False),
        "email": ("pii", "plaintext", True),
        "card": ("pci", "pii", False),
        "new": ("undecided", "plaintext", False),
        "notes": ("pii", "undecided", False),
    }
    assert "customers.email loses protection" in done.stderr
    for allowed in ("email", "customers.email"):
        assert run("check", config, "--since", "HEAD", "--allow-weaker", allowed).exit_code == 0
    assert run("check", config, "--since", "HEAD", "--allow-weaker", "card").exit_code == 1


def test_a_removed_label_where_unlabelled_columns_are_plaintext(run, repository: Path) -> None:
    config = repository / "keys" / "c.yaml"
    config.write_text(CONFIGURATION + "    unlabelled: public\n")
    git(repository, "commit", "--all", "--quiet", "--message", "Decide")
    label(repository, id="public", card="payment", notes="pii")
    done = run("check", config, "--since", "HEAD", "--json")
    assert done.exit_code == 1
    assert changes(done) == {"email": ("pii", "plaintext", True)}


def test_the_columns_of_a_file(run, repository: Path, tmp_path: Path) -> None:
    """A glob counts for columns that a file has."""
    config, plain = repository / "keys" / "c.yaml", tmp_path / "plain.parquet"
    pq.write_table(pa.table({"id": [1], "email": ["a"], "card": ["1"], "notes": ["x"]}), plain)
    config.write_text(CONFIGURATION + "    column_keys: {pci: ['e*']}\n")
    done = run("check", config, "--since", "HEAD", "--against", plain, "--json")
    assert changes(done) == {"email": ("pii", "pci", False)}
    assert done.exit_code == 0


def test_an_old_configuration(run, repository: Path, tmp_path: Path) -> None:
    old = tmp_path / "old" / "c.yaml"
    (tmp_path / "old" / "labels").mkdir(parents=True)
    old.write_text(CONFIGURATION + "    algorithm: AES_GCM_CTR_V1\n    plaintext_footer: false\n")
    (tmp_path / "old" / "labels" / "customers.csv").write_text("column,class\nid,public\n")
    config = repository / "keys" / "c.yaml"
    done = run("check", config, "--against", old, "--json")
    assert done.exit_code == 0
    found = changes(done)
    assert found["algorithm"] == ("AES_GCM_CTR_V1", "AES_GCM_V1", False)
    assert found["email"] == ("undecided", "pii", False)
    # The other way round.
    done = run("check", old, "--against", config)
    assert done.exit_code == 1 and "customers.algorithm loses protection" in done.stderr


def test_mistakes(run, repository: Path, tmp_path: Path) -> None:
    config = repository / "keys" / "c.yaml"
    for revision in ("no-such-branch", "--help"):
        done = run("check", config, "--since", revision)
        assert done.exit_code == 2 and "git show failed" in done.stderr
    config.write_text(CONFIGURATION.replace("customers.csv", "other.csv"))
    (repository / "keys" / "labels" / "other.csv").write_text("column,class\n")
    # The old configuration had another file.
    assert run("check", config, "--since", "HEAD").exit_code == 0
    git(repository, "rm", "--quiet", "--cached", "keys/labels/customers.csv")
    git(repository, "commit", "--quiet", "--message", "Remove")
    done = run("check", config, "--since", "HEAD")
    assert done.exit_code == 2 and "OLD.yaml" in done.stderr
    alone = tmp_path / "alone.yaml"
    alone.write_text("version: 1\n")
    assert run("check", alone, "--since", "HEAD").exit_code == 2


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("unlabelled: pii", "unlabelled: public"),
        ("unlabelled: public\n    column_keys: {pii: ['addr*']}", "unlabelled: public"),
        (
            "unlabelled: public\n    labels_from: [arrow: {}, csv: labels/customers.csv]",
            "unlabelled: public\n    labels_from: [csv: labels/customers.csv]",
        ),
    ],
    ids=["unlabelled columns", "a pattern", "labels of the data"],
)
def test_what_no_column_names(run, repository: Path, before: str, after: str) -> None:
    config = repository / "keys" / "c.yaml"

    def write(more: str) -> None:
        own = "    labels_from: [csv: labels/customers.csv]\n"
        text = CONFIGURATION.replace(own, "") if "labels_from" in more else CONFIGURATION
        config.write_text(f"{text}    {more}\n")

    write(before)
    git(repository, "commit", "--all", "--quiet", "--message", "Before")
    write(after)
    done = run("check", config, "--since", "HEAD", "--json")
    assert done.exit_code == 1, done.output
    assert any(weaker for _, _, weaker in changes(done).values())


@pytest.mark.parametrize("source", ["arrow", "iceberg"])
def test_a_class_that_labels_of_the_data_may_name(run, repository: Path, source: str) -> None:
    config = repository / "keys" / "c.yaml"
    text = CONFIGURATION.replace("[csv: labels/customers.csv]", f"[{source}: {{}}]")
    config.write_text(text)
    git(repository, "commit", "--all", "--quiet", "--message", "Before")
    config.write_text(text.replace("pii: {key: pii}", "pii: plaintext").replace("payment: {key: pci}, ", ""))
    done = run("check", config, "--since", "HEAD", "--json")
    assert done.exit_code == 1
    assert changes(done) == {"class pii": ("pii", "plaintext", True), "class payment": ("pci", "none", False)}
    assert run("check", config, "--since", "HEAD", "--allow-weaker", "class pii").exit_code == 0


def test_another_master_key_behind_a_name_is_shown(run, repository: Path) -> None:
    config = repository / "keys" / "c.yaml"
    config.write_text(CONFIGURATION + "master_keys: {pii: pci}\n")
    done = run("check", config, "--since", "HEAD", "--json")
    assert done.exit_code == 0
    assert changes(done) == {"master key pii": ("pii", "pci", False)}


def test_a_pattern_under_a_key_that_is_called_plaintext(run, tmp_path: Path) -> None:
    """The texts are equal before and after, and yet the columns lose their key."""
    head = "version: 1\nkms: {type: in_memory, keys: [footer, plaintext]}\ntables:\n  t:\n    footer_key: footer\n"
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    new.write_text(head + "    unlisted_columns: plaintext\n    column_keys: {footer: [a]}\n")
    old.write_text(new.read_text().replace("[a]}", "[a], plaintext: ['x.*']}"))
    done = run("check", new, "--offline", "--against", old, "--json")
    assert done.exit_code == 1 and changes(done) == {"x.*": ("plaintext", "plaintext", True)}
