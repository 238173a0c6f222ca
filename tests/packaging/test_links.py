"""Every link between pages of the repository leads to a file and an anchor that exist, also on the site."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit
from xml.etree import ElementTree

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    file.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", ".github/**/*.md")
    for file in ROOT.glob(pattern)
)


def _site_pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site = _site_pages()


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as the forge makes them."""
    seen: Counter[str] = Counter()
    found = set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
    without_blocks = re.sub(r"^( *)(```+|~~~+).*?^\1\2\s*?$", "", text, flags=re.M | re.S)
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", without_blocks, re.M):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def broken_links(root: Path, page: str) -> Iterator[str]:
    """Yield the mistakes in a page's links to other pages of its repository."""
    text = (root / page).read_text(encoding="utf-8")
    prose = site.CODE.sub("", text)
    if found := re.search(r"^\[[^]]+\]: ", prose, re.M):
        yield f"{found[0]}... is a link by reference, which nothing here follows"
    for link in site.LINK.finditer(prose):
        parts = urlsplit(link["target"])
        if parts.scheme or parts.netloc:
            continue
        target = (root / page).parent / parts.path if parts.path else root / page
        if not target.exists():
            yield f"{link['target']}: there is no such file"
        elif parts.fragment and parts.fragment not in anchors(target.read_text(encoding="utf-8")):
            yield f"{link['target']}: there is no such heading"


def test_links_lead_somewhere() -> None:
    assert "README.md" in PAGES
    assert [(page, link) for page in PAGES for link in broken_links(ROOT, page)] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see [this](missing.md)", "missing.md: there is no such file"),
        ("![picture](docs/missing.svg)", "docs/missing.svg: there is no such file"),
        ('<img src="missing.svg">', "missing.svg: there is no such file"),
        ("[x](other.md#no-such)", "other.md#no-such: there is no such heading"),
        ("[x](#in-a-block)\n\n```\n# In a block\n```\n", "#in-a-block: there is no such heading"),
        ("[x]: other.md", "[x]: ... is a link by reference, which nothing here follows"),
    ],
)
def test_a_broken_link_is_found(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    (tmp_path / "other.md").write_text("# A heading\n", encoding="utf-8")
    assert list(broken_links(tmp_path, "page.md")) == [expected]


def test_good_links_are_not_reported(tmp_path: Path) -> None:
    text = (
        "# Same\n\n## Same\n\n[a](#same) [b](#same-1) [c](other.md#kms-every-kind_of-kms) [d](https://host/x)\n"
        "`[e](code.md)`\n\n```text\n[f](block.md)\n```\n"
    )
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    (tmp_path / "other.md").write_text("## kms: every `kind_of` [KMS](x)\n", encoding="utf-8")
    assert list(broken_links(tmp_path, "page.md")) == []


def test_the_site_has_a_page_for_each_link() -> None:
    # A link without a page raises an error that names both.
    for page in (page for page in PAGES if page.startswith("docs/") or page in site.TEXTS):
        text = (ROOT / page).read_text(encoding="utf-8")
        site.rewritten(text, page, site.TEXTS.get(page) or page.removeprefix("docs/"))


@pytest.mark.parametrize(
    ("link", "source", "page", "expected"),
    [
        ("../examples/keystore.py", "docs/guide.md", "guide.md", "examples/keystore.md"),
        ("../../README.md#errors", "docs/adr/0002.md", "adr/0002.md", "../index.md#errors"),
        ("docs/guide.md#tables", "README.md", "index.md", "guide.md#tables"),
        ("configs", "README.md", "index.md", "configs/index.md"),
        ("rules.md", "docs/verify.md", "verify.md", "rules.md"),
        ("https://host/docs/x.md", "README.md", "index.md", "https://host/docs/x.md"),
    ],
)
def test_links_are_rewritten_for_the_site(link: str, source: str, page: str, expected: str) -> None:
    text = "[x]({0}) ![y]({0}) `[z]({0})`"
    assert site.rewritten(text.format(link), source, page) == (f"[x]({expected}) ![y]({expected}) `[z]({link})`")


def test_a_link_to_what_the_site_does_not_show_is_refused() -> None:
    with pytest.raises(site.MissingPageError, match=r"docs/guide\.md links to tests/conftest\.py"):
        site.rewritten("[x](../tests/conftest.py)", "docs/guide.md", "guide.md")


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, which names Python objects."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def _nav_pages(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    else:
        for item in node.values() if isinstance(node, dict) else node:
            yield from _nav_pages(item)


def test_every_page_of_the_site_has_its_place_once() -> None:
    document = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)
    names = [file.relative_to(ROOT / "docs").as_posix() for file in (ROOT / "docs").rglob("*.md")]
    names += site.pages_of_files().values()
    assert sorted(_nav_pages(site.expanded(document["nav"], names))) == sorted(names)


def _pictures() -> list[tuple[str, str]]:
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "docs").rglob("*.md")]
    return sorted({(found["kind"], found["name"]) for text in texts for found in site.PICTURE.finditer(text)})


@pytest.mark.parametrize(("kind", "name"), _pictures())
def test_pictures_of_the_site_are_drawn(kind: str, name: str) -> None:
    root = ElementTree.fromstring(site.drawn(kind, name))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.findall(".//{*}rect")[1:], "nothing but the panel"


def test_every_plot_is_shown_with_the_figures_of_its_page() -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    figures = json.loads((ROOT / "benchmarks" / "figures.json").read_text(encoding="utf-8"))
    assert {name for kind, name in _pictures() if kind == "plot"} == figures.keys()
    for name, chart in figures.items():
        section = page.partition(f"<!-- plot: {name} -->")[2].partition("<!-- plot")[0]
        assert [value for _, value in chart.get("bars", []) if not re.search(rf"\| {value}\b", section)] == []


def test_lines_are_drawn_on_logarithmic_axes() -> None:
    plots = site.script_of("plot", "kms")
    points = [[100, 0.02], [1_000, 0.2], [10_000, 2.0]]
    chart = {"title": "t", "axis": "files", "lines": [{"label": "a", "dashed": True, "points": points}]}
    root = ElementTree.fromstring(plots.lines(chart))
    (line,) = [
        found for found in root.findall(".//{*}path") if found.get("stroke-width") and "L" in found.get("d", "")
    ]
    places = [tuple(map(float, place.split())) for place in line.get("d", "")[1:].split("L")]
    (x0, y0), (x1, y1), (x2, y2) = places
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert {"100", "1,000", "10,000", "0.01 s", "10 s"} <= {text.text for text in root.findall(".//{*}text")}


def test_a_comment_becomes_a_picture() -> None:
    assert (
        site.pictured("a\n\n<!-- plot: kms -->\n", "performance.md") == "a\n\n![plot: kms](images/drawn-kms.svg)\n"
    )
