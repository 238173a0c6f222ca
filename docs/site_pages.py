"""Hooks of MkDocs: pages of the site that lie outside of docs/, and links to them.

On the forge a page links to `../examples/keystore.py`. The site gets a page for each example and configuration,
and for README.md and the other texts of the repository; links are rewritten to these. Pictures that a script draws
are on the site only: a page says where with a comment such as `<!-- plot: kms -->`.
"""

from __future__ import annotations

import importlib.util
import posixpath
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]

TEXTS = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
}
"""File of the repository -> page of the site that has its text."""

LISTINGS = {"examples": ("Examples", "*.py"), "configs": ("Configurations", "*.yaml")}
"""Folder of the repository -> title of the page that lists its files, and which of them have a page each."""

_LANGUAGES = {".py": "python", ".yaml": "yaml"}

LINK = re.compile(r"(?P<before>\]\(|\b(?:href|src|srcset)=\")(?P<target>[^)\s\"]+)")
"""A link or picture of Markdown or HTML."""

CODE = re.compile(r"^(?P<indent> *)(?P<fence>```+|~~~+).*?^(?P=indent)(?P=fence)\s*?$|`[^`\n]+`", re.M | re.S)
"""What has no links: code in blocks and in lines."""


PICTURE = re.compile(r"^<!-- (?P<kind>plot|picture): (?P<name>[a-z-]+) -->$", re.M)
"""Where a page of the site has a picture that a script draws."""


class MissingPageError(Exception):
    """A page links to a file of the repository that the site does not show."""


def pages_of_files() -> dict[str, str]:
    """Return which page of the site shows which file or folder of the repository, all of them outside of docs/."""
    pages = {name: page for name, page in TEXTS.items() if (ROOT / name).is_file()}
    pages["LICENSE"] = "license.md"
    for folder, (_, pattern) in LISTINGS.items():
        pages[folder] = f"{folder}/index.md"
        for file in sorted((ROOT / folder).glob(pattern)):
            pages[f"{folder}/{file.name}"] = f"{folder}/{file.stem}.md"
    return pages


def rewritten(text: str, source: str, page: str) -> str:
    """Return Markdown whose links lead to pages of the site.

    Args:
        text: The Markdown.
        source: The file of the repository that it is from, such as `docs/guide.md`.
        page: The page of the site that it becomes, such as `guide.md`.

    Raises:
        MissingPageError: A link leads to a file that the site does not show.
    """
    pages = pages_of_files()

    def link(found: re.Match[str]) -> str:
        parts = urlsplit(found["target"])
        if parts.scheme or parts.netloc or not parts.path:
            return found[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), parts.path))
        shown = target.removeprefix("docs/") if target.startswith("docs/") else pages.get(target)
        if shown is None:
            raise MissingPageError(
                f"{source} links to {target}, and the site does not show it: link to a page, or add it to "
                "docs/site_pages.py"
            )
        anchor = f"#{parts.fragment}" if parts.fragment else ""
        return f"{found['before']}{posixpath.relpath(shown, posixpath.dirname(page) or '.')}{anchor}"

    done, end = [], 0
    for code in CODE.finditer(text):
        done += [LINK.sub(link, text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*done, LINK.sub(link, text[end:])])


def generated_pages() -> Iterator[tuple[str, str]]:
    """Yield each page that is no file of docs/, and its Markdown."""
    for name, page in pages_of_files().items():
        path = ROOT / name
        if path.is_dir():
            title, pattern = LISTINGS[name]
            lines = [
                f"- [`{file.name}`]({file.stem}.md): {_first_line(file)}" for file in sorted(path.glob(pattern))
            ]
            yield page, f"# {title}\n\n" + "\n".join(lines) + "\n"
        elif name in TEXTS:
            yield page, rewritten(path.read_text(encoding="utf-8"), name, page)
        else:
            language = _LANGUAGES.get(path.suffix, "text")
            yield page, f"# {path.name}\n\n````{language}\n{path.read_text(encoding='utf-8')}````\n"


def drawn(kind: str, name: str) -> str:
    """Return the SVG picture that a comment asks for: a plot of the benchmarks, or of `docs/NAME_picture.py`."""
    script = script_of(kind, name)
    return str(script.plot(name) if kind == "plot" else script.sample_picture())


def script_of(kind: str, name: str) -> ModuleType:
    """Return the script that draws plots, or a picture."""
    path = ROOT / ("benchmarks/plots.py" if kind == "plot" else f"docs/{name}_picture.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def pictured(markdown: str, page: str) -> str:
    """Return Markdown of a page in which each comment for a picture has become that picture."""
    up = posixpath.relpath("images", posixpath.dirname(page) or ".")
    return PICTURE.sub(
        lambda found: f"![{found['kind']}: {found['name']}]({up}/drawn-{found['name']}.svg)", markdown
    )


def _first_line(file: Path) -> str:
    """Return what the first line of a source file or configuration says of it."""
    return file.read_text(encoding="utf-8").partition("\n")[0].strip('"# ')


def expanded(node: Any, names: list[str]) -> Any:
    """Return a part of `nav` in which a pattern such as `adr/*.md` is the list of pages that match it."""
    if isinstance(node, list):
        return [expanded(item, names) for item in node]
    if isinstance(node, dict):
        return {title: expanded(item, names) for title, item in node.items()}
    if "*" not in node:
        return node
    return sorted(filter(lambda name: fnmatch(name, node), names), key=lambda name: ("/index." not in name, name))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside of docs/, and expand the patterns in `nav`."""
    from mkdocs.exceptions import PluginError
    from mkdocs.structure.files import File

    try:
        for page, text in generated_pages():
            files.append(File.generated(config, page, content=text))
    except MissingPageError as error:
        raise PluginError(str(error)) from error
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for found in PICTURE.finditer(page.read_text(encoding="utf-8")):
            files.append(
                File.generated(config, f"images/drawn-{found['name']}.svg", content=drawn(**found.groupdict()))
            )
    config.nav = expanded(config.nav, [file.src_uri for file in files.documentation_pages()])
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page of docs/; those of the other pages are rewritten when these are made."""
    from mkdocs.exceptions import PluginError

    if page.file.generated_by is not None:
        return markdown
    try:
        return rewritten(pictured(markdown, page.file.src_uri), f"docs/{page.file.src_uri}", page.file.src_uri)
    except MissingPageError as error:
        raise PluginError(str(error)) from error
