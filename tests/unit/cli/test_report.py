"""`parquet-keytools report`: its contents, and that its page is safe to open, to print, and to hear read aloud."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from parquet_keytools import Keytools
from parquet_keytools.kms.keystore_file import Keystore, KeystoreKms
from parquet_keytools.kms.passphrase import passphrase_from_file

HOSTILE = '"><script>alert(1)</script><img src=http://127.0.0.1:9/x onerror=alert(2)>&amp;'


def document_of(done: Any) -> dict[str, Any]:
    return json.loads(done.stdout)


def column_of(document: dict[str, Any], name: str) -> dict[str, Any]:
    (column,) = [column for column in document["columns"] if name in (column["column"], column["part"])]
    return column


def keys_of(document: dict[str, Any], name: str) -> dict[tuple[str, str | None], int]:
    """Return (master key, version) -> files of a column."""
    keys = document["keys"]
    return {
        (keys[int(position)]["key"], keys[int(position)]["version"]): files
        for position, files in column_of(document, name)["keys"].items()
    }


@pytest.fixture
def analyst(tmp_path: Path, keystore_case: Any) -> Path:
    """A configuration with a copy of the keystore of `keystore_case` in which `pii` is disabled."""
    case = keystore_case(unlisted_columns="plaintext")
    case.keystore.rotate_key("pii")
    with Keytools.from_yaml(case.config) as keytools:
        keytools.rotate(case.files[0])
    copy, config = tmp_path / "analyst.json", tmp_path / "analyst.yaml"
    shutil.copy(tmp_path / "keystore.json", copy)
    config.write_text(case.config.read_text().replace("keystore.json", copy.name))
    Keystore(copy, lambda: passphrase_from_file(tmp_path / "passphrase")).set_enabled("pii", False)
    return config


def test_who_what_when(run, tmp_path: Path, analyst: Path) -> None:
    config, data = tmp_path / "keystore.yaml", tmp_path / "data"
    os.utime(data / "year=2" / "b.parquet", (1_700_000_000, 1_700_000_000))
    done = run("report", data, "--config", config, "--as", f"ana={analyst}", "--as", f"owner={config}", "--json")
    assert done.exit_code == 0, done.stderr
    document = document_of(done)
    assert document["counts"] == {"encrypted": 2, "plaintext": 0, "unreadable": 0, "skipped": 0, "not_parquet": 0}
    assert document["verdict"] == "conforms, with weaknesses" and document["conforms"]
    assert keys_of(document, "footer") == {("footer", "1"): 2}
    assert keys_of(document, "name") == {("pii", "1"): 1, ("pii", "2"): 1}
    assert column_of(document, "id")["plaintext_files"] == 2 and not column_of(document, "id")["keys"]
    access = column_of(document, "name")["access"]
    assert access["ana"] == {"reads": 0, "refused": 2, "unknown": 0, "reasons": {"pii: MasterKeyDisabledError": 2}}
    assert access["owner"] == {"reads": 2, "refused": 0, "unknown": 0, "reasons": {}}
    assert column_of(document, "footer")["access"]["ana"]["reads"] == 2
    old = next(key for key in document["keys"] if (key["key"], key["version"]) == ("pii", "1"))
    assert old["first_modified"] == old["last_modified"] == "2023-11-14T22:13:20Z"
    assert old["created"] is not None and old["files"] == 1
    assert [(entry["key"], entry["version"]) for entry in document["timeline"] if entry["key"] == "pii"] == [
        ("pii", "1"),
        ("pii", "2"),
    ]
    weakness, plaintext = document["exceptions"]
    assert weakness["text"].startswith("Verification: weakness of rule no-prefix (section 4.4.1).")
    assert plaintext["text"] == "Column id is plaintext in encrypted files." and not plaintext["is_problem"]
    assert any("modification times" in remark["text"].lower() for remark in document["not_examined"])


def test_each_wrapped_key_is_unwrapped_once(
    run, tmp_path: Path, keystore_case, table, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = keystore_case()
    with Keytools.from_yaml(case.config) as keytools:
        for number in range(20):
            keytools.write_table(table, case.data / f"{number}.parquet")
    asked: list[str] = []
    original = KeystoreKms._unwrap_many

    def unwrap(self: KeystoreKms, requests: Any) -> Any:
        asked.extend(request.wrapped_key for request in requests)
        return original(self, requests)

    monkeypatch.setattr(KeystoreKms, "_unwrap_many", unwrap)
    arguments = ("report", case.data, "--config", case.config, "--no-verify", "--json")
    assert run(*arguments).exit_code == 0
    alone = len(asked)
    assert alone == len(set(asked))
    asked.clear()
    assert run(*arguments, "--as", f"x={case.config}").exit_code == 0
    assert len(asked) == 2 * alone


def test_exceptions_come_first_and_are_1(run, keystore_case, table, tmp_path: Path) -> None:
    case = keystore_case(unlisted_columns="footer_key")
    pq.write_table(table, case.data / "year=2" / "open.parquet")
    (case.data / "notes.csv").write_text("id\n1\n")
    (case.data / "_tmp").mkdir()
    shutil.copy(case.files[0], case.data / "_tmp" / "copy.parquet")
    done = run("report", case.data, "--config", case.config, "--json")
    assert done.exit_code == 1
    document = document_of(done)
    assert document["plaintext_files"] == [str(case.data / "year=2" / "open.parquet")]
    assert document["not_parquet"] == [str(case.data / "notes.csv")]
    kinds = [remark["is_problem"] for remark in document["exceptions"]]
    assert kinds == sorted(kinds, reverse=True) and kinds[0]
    texts = " ".join(remark["text"] for remark in document["exceptions"])
    assert "Files that are not encrypted at all." in texts
    assert "Columns that are encrypted in some files and plaintext in others." in texts
    assert "skipped because of its name" in texts
    assert keys_of(document, "id") == {("footer", "1"): 2} and column_of(document, "id")["plaintext_files"] == 1
    assert "Who reads which column: no configuration was named with --as." in [
        remark["text"] for remark in document["not_examined"]
    ]
    text = run("report", case.data, "--config", case.config, "--no-verify").stdout
    assert text.startswith("Problem: Files that are not encrypted at all. (1) For example: ")
    assert text.splitlines()[-1] == (
        "2 encrypted files, 1 plaintext, 1 skipped because of their names, 1 not Parquet; not verified."
    )


def test_a_file_that_was_altered_shows_nothing_about_access(run, keystore_case) -> None:
    case = keystore_case(plaintext_footer=True)
    content = bytearray(case.files[0].read_bytes())
    content[-20] ^= 1
    case.files[0].write_bytes(content)
    done = run("report", case.data, "--config", case.config, "--as", f"x={case.config}", "--json")
    assert done.exit_code == 1
    access = column_of(document_of(done), "name")["access"]["x"]
    assert (access["reads"], access["unknown"]) == (1, 1)
    assert access["reasons"] == {"the file is not authentic": 1}


def test_refused_by_the_kms_is_3(run, keystore_case, tmp_path: Path) -> None:
    case = keystore_case()
    case.keystore.set_enabled("footer", False)
    done = run("report", case.data, "--config", case.config, "--json")
    assert done.exit_code == 3
    assert any("could not be proven" in remark["text"] for remark in document_of(done)["exceptions"])


def test_an_existing_page_is_kept(run, keystore_case, tmp_path: Path) -> None:
    case, page = keystore_case(), tmp_path / "report.html"
    page.write_text("mine")
    arguments = ("report", case.data, "--config", case.config, "--html", page)
    done = run(*arguments)
    assert done.exit_code == 2 and page.read_text() == "mine"
    assert run(*arguments, "--overwrite").exit_code == 0
    assert page.read_text().startswith("<!DOCTYPE html>")


# --- the page ---


@pytest.fixture
def page(run, tmp_path: Path) -> Path:
    """A report with hostile names: of a column, a file, a master key and a configuration."""
    keys = {"footer": "Zm9vdGVyZm9vdGVyZm9vdA==", HOSTILE: "cGlpcGlpcGlpcGlpcGlpcA=="}
    configuration = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": keys},
        "tables": {
            "t": {"footer_key": "footer", "column_keys": {HOSTILE: [HOSTILE]}, "unlisted_columns": "plaintext"}
        },
    }
    config = tmp_path / "hostile.yaml"
    config.write_text(json.dumps(configuration))
    config.chmod(0o600)
    data = tmp_path / "hostile"
    data.mkdir()
    table = pa.table({"id": [1, 2], HOSTILE: ["x", "y"]})
    name = HOSTILE.replace("/", "-")
    with Keytools.from_yaml(config) as keytools:
        keytools.write_table(table, data / f"{name}.parquet")
    pq.write_table(table, data / "open.parquet")
    (data / f"{name}.csv").write_text("x")
    path = tmp_path / "report.html"
    done = run("report", data, "--config", config, "--as", f"{HOSTILE.replace('=', '')}={config}", "--html", path)
    assert done.exit_code == 1, done.output
    return path


def test_names_cannot_inject(page: Path) -> None:
    text = page.read_text()
    assert "&lt;script&gt;alert(1)" in text
    for tag in ("<script", "<img", "<link", "<iframe", "onerror=alert(2)>"):
        assert tag not in text.lower().replace("&gt;", ""), tag
    assert "default-src &#x27;none&#x27;" in text or "default-src 'none'" in text
    assert "unsafe" not in text and ' style="' not in text
    assert text.index("<h2>Exceptions") < text.index("<h2>Which column") < text.index("<h2>Not examined")


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# As root, and without a request of its own.
CHROMIUM_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: no browser opens a report"
    )
    if CHROMIUM is None:
        pytest.skip("no browser opens a report: Chromium is not installed")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGUMENTS)
        yield opened
        opened.close()


def test_chromium_opens_the_page(browser: Any, page: Path) -> None:
    shown = browser.new_page()
    messages: list[str] = []
    requests: list[str] = []
    shown.on("console", lambda message: messages.append(message.text))
    shown.on("pageerror", lambda error: messages.append(str(error)))
    shown.on("dialog", lambda dialog: (messages.append(dialog.message), dialog.dismiss()))
    shown.on("request", lambda request: requests.append(request.url))
    shown.goto(page.as_uri())
    assert messages == [] and requests == [page.as_uri()]
    # The style sheet applies: its hash is in the policy.
    assert shown.evaluate("getComputedStyle(document.querySelector('td')).borderTopStyle") == "solid"
    assert shown.locator("script, img").count() == 0
    assert shown.locator("h1").inner_text() == "Column encryption report"
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")
    # axe is a script, which the page's policy forbids.
    checked = browser.new_context(bypass_csp=True).new_page()
    checked.goto(page.as_uri())
    found = axe.Axe().run(checked).response["violations"]
    assert [
        (entry["id"], entry["impact"], [node["html"][:200] for node in entry["nodes"]]) for entry in found
    ] == []


SPILLED = """() => [...document.querySelectorAll("h1, h2, p, li, caption, td, th, svg")]
    .filter(part => part.getClientRects().length)
    .filter(part => part.getBoundingClientRect().right > innerWidth + 1 || part.scrollWidth > part.clientWidth + 1)
    .filter(part => !OUTSIDE.some(name => part.closest(name)))
    .map(part => part.outerHTML.slice(0, 100))"""


def test_nothing_is_cut_off_on_paper_or_on_a_narrow_screen(browser: Any, run, tmp_path: Path) -> None:
    names = [
        f"arn:aws:kms:eu-west-1:111122223333:key/11111111-1111-4111-8111-{number:012}" for number in range(13)
    ]
    configuration = {
        "version": 1,
        "kms": {"type": "in_memory", "keys": dict.fromkeys(names, "Zm9vdGVyZm9vdGVyZm9vdA==")},
        "tables": {
            "t": {
                "footer_key": names[0],
                "column_keys": {name: [f"c{number}_*"] for number, name in enumerate(names)},
            }
        },
    }
    config, data, page = tmp_path / "many.yaml", tmp_path / "many", tmp_path / "many.html"
    config.write_text(json.dumps(configuration))
    config.chmod(0o600)
    data.mkdir()
    columns = {f"c{number}_{'a_long_name_of_a_column_' * 3}": [1] for number in range(len(names))}
    with Keytools.from_yaml(config) as keytools:
        keytools.write_table(pa.table(columns), data / f"{'a-long-name-of-a-file-' * 8}.parquet")
    done = run("report", data, "--config", config, "--as", f"x={config}", "--html", page)
    assert done.exit_code == 0, done.output
    # A4 with margins of one centimetre has 718 pixels; a screen scrolls the tables.
    for media, width, outside in (("print", 718, "[]"), ("screen", 375, '[".wide"]')):
        shown = browser.new_page(viewport={"width": width, "height": 900})
        shown.emulate_media(media=media)
        shown.goto(page.as_uri())
        assert shown.evaluate(SPILLED.replace("OUTSIDE", outside)) == [], media
        assert shown.evaluate("document.documentElement.scrollWidth") == width
    assert shown.pdf(format="A4").startswith(b"%PDF")
    text = page.read_text()
    matrix = text[text.index("<h2>Which column") : text.index("<h2>Who reads")]
    assert all(f"K{number}: " in matrix for number in range(1, len(names) + 1))
    # Each column is in the first table, and in the table of its key.
    assert [matrix.count(f">c{number}_") for number in (0, 4, 5, 12)] == [1, 1, 2, 2]
