"""`parquet-keytools report`: the report for an auditor as text, JSON and HTML."""

from __future__ import annotations

import base64
import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from parquet_keytools.cli import options as opt
from parquet_keytools.cli import output as out
from parquet_keytools.runtime.presentation import printable

if TYPE_CHECKING:
    from parquet_keytools.protection_report import Access, ColumnReport, ProtectingKey, ProtectionReport, Remark


@opt.with_options(opt.ReportOptions)
def report_command(
    paths: opt.PathsArgument,
    config: opt.ConfigOption,
    readers: Annotated[
        list[str] | None,
        typer.Option(
            "--as",
            metavar="NAME=CONFIG",
            help="A configuration whose access is measured: its KMS is asked to unwrap the files' keys. "
            "Repeatable.",
        ),
    ] = None,
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Write the report to this file or URI, as HTML.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file of --html.")] = False,
    no_verify: Annotated[
        bool,
        typer.Option("--no-verify", help="Do not verify the files, which reads all of them. The report says so."),
    ] = False,
    table: opt.TableOption = None,
    aad_prefix: opt.AadPrefixOption = None,
    processes: opt.ProcessesOption = None,
) -> None:
    """Report which column is under which key, and who reads it.

    The exit status is 0 only if the report has no problem: the files conform, none is plaintext, and all keys are
    proven. With --no-verify, nothing is looked for in hidden folders and under names that readers skip. Column
    access is measured with the keys of the files, not read from configurations or policies.
    """
    from parquet_keytools.keytools import Keytools
    from parquet_keytools.protection_report import make_report
    from parquet_keytools.runtime.worker_processes import command_line_processes
    from parquet_keytools.storage.outputs import discarded_unless_done, exists_already, pending_output

    location = opt.locations_of(paths, "PATH")
    target = None if html is None else opt.location_of(html, "--html")
    if target is not None and not overwrite and target.is_file():
        raise exists_already(target)
    with contextlib.ExitStack() as stack:
        keytools = stack.enter_context(Keytools.from_yaml(config))
        if table is not None:
            keytools.configuration.select_table(table)
        named = {
            name: stack.enter_context(Keytools.from_yaml(Path(file)))
            for name, file in opt.pairs_of(readers, "--as").items()
        }
        with out.progress_bar() as progress, command_line_processes(processes):
            report = make_report(
                keytools,
                location,
                named,
                table_name=table,
                aad_prefix=aad_prefix,
                verify=not no_verify,
                on_file=progress.count,
            )
    shown = grouped(report, keytools.configuration.template_of)
    if target is not None:
        page = "".join(f"{line}\n" for line in html_lines(shown)).encode()
        with discarded_unless_done(pending_output(target, overwrite=overwrite)) as pending:
            with pending.open_sink() as sink:
                sink.write_at(0, page)
            pending.commit()
        out.say(f"The report is in {target}.")
    if out.json_wanted():
        out.print_json(report.to_dict())
    else:
        _show(shown)
    status = out.status_of_all(report.failures)
    if report.failures and status is not out.ExitStatus.NO:
        raise typer.Exit(status)
    if report.has_problems:
        raise typer.Exit(out.ExitStatus.NO)


def grouped(report: ProtectionReport, template_of: Callable[[str], str | None]) -> ProtectionReport:
    """Return a report for people, in which many keys of one template, in one version, are one key."""
    groups: dict[object, list[int]] = {}
    for position, key in enumerate(report.keys):
        template = template_of(key.key)
        groups.setdefault((template, key.version) if template else position, []).append(position)
    lines = sorted(
        line
        for group in groups.values()
        for line in ([group] if len(group) > out.MOST_OF_A_TEMPLATE else ([position] for position in group))
    )
    place = {position: number for number, line in enumerate(lines) for position in line}
    merged = {report.keys[position].key for line in lines if len(line) > 1 for position in line}

    def key_of(line: list[int]) -> ProtectingKey:
        first, *others = members = [report.keys[position] for position in line]
        if not others:
            return first
        return replace(
            first,
            key=f"{template_of(first.key)} ({len(members):,} values)",
            files=sum(key.files for key in members),
            created=min((key.created for key in members if key.created), default=None),
            created_note=first.created_note or "the first of them",
            first_modified=min((key.first_modified for key in members if key.first_modified), default=None),
            last_modified=max((key.last_modified for key in members if key.last_modified), default=None),
        )

    def counted(column: ColumnReport) -> ColumnReport:
        counts: Counter[int] = Counter()
        for position, number in column.keys.items():
            counts[place[position]] += number
        return replace(column, keys=counts)

    return replace(
        report,
        keys=tuple(map(key_of, lines)),
        columns=tuple(map(counted, report.columns)),
        timeline=tuple(version for version in report.timeline if version.key not in merged),
        files=tuple(
            replace(file, keys=tuple(sorted({place[position] for position in file.keys}))) for file in report.files
        ),
    )


# --- text ---


def _show(report: ProtectionReport) -> None:
    for remark in report.exceptions:
        out.answer(f"{'Problem' if remark.is_problem else 'Note'}: {_remark_text(remark)}")
    rows = []
    for column in report.columns:
        access = [_access_text(column, column.access.get(reader)) for reader in report.readers]
        rows.append((column.title, f"{column.files:,}", _keys_text(report, column), *access))
    out.print_table("Columns", ["column", "files", "keys", *report.readers], rows)
    key_rows = [
        (key.key, key.version or "?", f"{key.files:,}", _created_text(key), key.first_modified, key.last_modified)
        for key in report.keys
    ]
    out.print_table("Keys", ["key", "version", "files", "created", "first file", "last file"], key_rows)
    for remark in report.not_examined:
        out.answer(f"Not examined: {_remark_text(remark)}")
    out.answer(_summary(report))


def _remark_text(remark: Remark) -> str:
    parts = [printable(remark.text)]
    if remark.count:
        parts.append(f"({remark.count:,})")
    if remark.examples:
        parts.append(f"For example: {', '.join(map(printable, remark.examples))}")
    return " ".join(parts)


def _keys_text(report: ProtectionReport, column: ColumnReport) -> str:
    texts = [
        f"{report.keys[position].key}@{report.keys[position].version or '?'} ({count:,})"
        for position, count in sorted(column.keys.items())
    ]
    if column.plaintext_files:
        texts.append(f"plaintext ({column.plaintext_files:,})")
    return ", ".join(texts)


def _access_text(column: ColumnReport, access: Access | None) -> str:
    """Return whether a configuration reads a column where it is encrypted."""
    if access is None:
        return "plaintext" if column.plaintext_files else ""
    counts = {"yes": access.reads, "no": access.refused, "unknown": access.unknown}
    found = {word: count for word, count in counts.items() if count}
    return next(iter(found)) if len(found) == 1 else ", ".join(f"{word} in {n:,}" for word, n in found.items())


def _created_text(key: ProtectingKey) -> str:
    if key.created is None:
        return key.created_note
    return f"{key.created} ({key.created_note})" if key.created_note else key.created


def _summary(report: ProtectionReport) -> str:
    counts = report.counts
    words = {
        "plaintext": "plaintext",
        "unreadable": "that could not be checked",
        "skipped": "skipped because of their names",
        "not_parquet": "not Parquet",
    }
    others = "".join(f", {counts[name]:,} {word}" for name, word in words.items() if counts[name])
    verdict = "not verified" if report.verdict is None else f"verification: {report.verdict}"
    return f"{out.number_of(counts['encrypted'], 'encrypted file')}{others}; {verdict}."


# --- HTML ---

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;color:#1b1b1b;background:#fff}
body{max-width:75rem;margin:2rem auto;padding:0 1rem;overflow-wrap:anywhere}
h1,h2{line-height:1.2}
table{border-collapse:collapse;width:100%;margin:.5rem 0 1rem}
caption{text-align:left;font-style:italic}
th,td{border:1px solid #767676;padding:.3rem .5rem;text-align:left;vertical-align:top;min-width:5em}
thead th{background:#e8eef4}
tbody th{min-width:8em}
td.number{text-align:right;overflow-wrap:normal}
td.time{white-space:nowrap}
td.yes{background:#dff0df}
td.no{background:#f7dede}
td.unknown,td.plaintext{background:#fdf3cf}
li.problem strong{color:#9b1c1c}
.wide{overflow-x:auto}
svg{width:100%;min-width:40rem;height:auto}
.paper{display:none}
@media print{body{font-size:10pt;margin:0;padding:0;max-width:none}.wide{overflow:visible}.paper{display:block}
svg{min-width:0}details.files{display:none}
thead{display:table-header-group}tr,li{break-inside:avoid}h2{break-after:avoid}
td,th,thead th{print-color-adjust:exact}}
""".strip()


def html_lines(report: ProtectionReport) -> Iterator[str]:
    """Yield the lines of one HTML page: without a script, and without anything to load.

    Anyone may have named the files, columns and keys: each text goes through `_text`.
    """
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    yield '<meta name="referrer" content="no-referrer">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>Column encryption report</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>"
    yield "<h1>Column encryption report</h1>"
    yield f"<p>Of {', '.join(_text(path) for path in report.paths)}, made at {_text(report.made)}.</p>"
    yield f"<p>{_text(_summary(report))}</p>"
    yield "<h2>Exceptions</h2>"
    yield _remark_list(report.exceptions, "There are no exceptions.")
    yield from _columns_by_keys(report)
    yield from _columns_by_readers(report)
    yield from _timeline(report)
    yield "<h2>Plaintext files</h2>"
    yield _path_list(report.plaintext_files, "All Parquet files are encrypted.")
    yield "<h2>Files that are not Parquet</h2>"
    yield _path_list(report.not_parquet, "There are none.")
    yield "<h2>Not examined</h2>"
    yield _remark_list(report.not_examined, "Everything was examined.")
    yield from _all_files(report)
    yield "</main>\n</body>\n</html>"


def _text(text: object) -> str:
    return escape(printable(str(text)), quote=True)


def _remark_list(remarks: Sequence[Remark], if_none: str) -> str:
    return _list("".join(map(_remark_item, remarks)), if_none)


def _remark_item(remark: Remark) -> str:
    kind = "problem" if remark.is_problem else "note"
    count = f" ({remark.count:,})" if remark.count else ""
    examples = "".join(f"<li>{_text(example)}</li>" for example in remark.examples)
    if examples and remark.count > len(remark.examples):
        examples += f"<li>and {remark.count - len(remark.examples):,} more</li>"
    inner = f"\n<ul>{examples}</ul>" if examples else ""
    return f'<li class="{kind}"><strong>{kind.capitalize()}:</strong> {_text(remark.text)}{count}{inner}</li>\n'


def _path_list(paths: Sequence[str], if_none: str) -> str:
    return _list("".join(f"<li>{_text(path)}</li>\n" for path in paths), if_none)


def _list(items: str, if_none: str) -> str:
    return f"<ul>\n{items}</ul>" if items else f"<p>{_text(if_none)}</p>"


def _table(label: str, headings: Iterable[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield a table, whose headings and cells are HTML; the first cell of a row is its heading.

    Its surroundings scroll, also with the keyboard.
    """
    yield f'<div class="wide" role="region" aria-label="{_text(label)}" tabindex="0">'
    yield f"<table>\n<caption>{_text(label)}</caption>\n<thead><tr>"
    yield "".join(f'<th scope="col">{heading}</th>' for heading in headings)
    yield "</tr></thead>\n<tbody>"
    for first, *others in rows:
        yield f'<tr><th scope="row">{first}</th>{"".join(others)}</tr>'
    yield "</tbody>\n</table>\n</div>"


def _cell(text: object, kind: str = "") -> str:
    return f'<td class="{kind}">{_text(text)}</td>' if kind else f"<td>{_text(text)}</td>"


def _key_title(report: ProtectionReport, position: int) -> str:
    key = report.keys[position]
    version = f", version {key.version or 'not visible'}" if key.kind == "master key" else " (data key)"
    return f"K{position + 1}: {key.key or 'unknown'}{version}"


_KEYS_AT_A_TIME = 5


def _columns_by_keys(report: ProtectionReport) -> Iterator[str]:
    yield "<h2>Which column is under which key</h2>"
    # Tables of a few keys each fit on paper.
    for first in range(0, max(len(report.keys), 1), _KEYS_AT_A_TIME):
        positions = range(first, min(first + _KEYS_AT_A_TIME, len(report.keys)))
        yield from _columns_by_some_keys(report, positions, with_sums=first == 0)


def _columns_by_some_keys(report: ProtectionReport, positions: range, *, with_sums: bool) -> Iterator[str]:
    headings = ["Column", *(_text(_key_title(report, position)) for position in positions)]
    rows = []
    for column in report.columns:
        counts = [column.keys.get(position, 0) for position in positions]
        if not with_sums and not any(counts):
            continue
        cells = [_cell(f"{count:,}" if count else "", "number") for count in counts]
        if with_sums:
            plaintext = column.plaintext_files
            cells.append(_cell(f"{plaintext:,}", "number plaintext") if plaintext else _cell("", "number"))
            cells.append(_cell(f"{column.files:,}", "number"))
        rows.append([_text(column.title), *cells])
    label = "Number of files in which a key protects a column"
    if len(positions) < len(report.keys):
        label += f": keys K{positions[0] + 1} to K{positions[-1] + 1}"
    yield from _table(label, headings + ["Plaintext", "Files"] * with_sums, rows)


def _columns_by_readers(report: ProtectionReport) -> Iterator[str]:
    yield "<h2>Who reads which column</h2>"
    if not report.readers:
        yield "<p>No configuration was named with --as.</p>"
        return
    yield (
        "<p>Measured: the KMS was asked, with each configuration, to unwrap the keys of the files. "
        "Plaintext columns can be read by anyone who can open the files.</p>"
    )
    reasons: dict[str, None] = {}
    rows = []
    for column in report.columns:
        cells = []
        for reader in report.readers:
            access = column.access.get(reader)
            text = _access_text(column, access)
            cells.append(_cell(text, text if text in ("yes", "no", "unknown", "plaintext") else ""))
            if access is not None:
                reasons |= {f"{reader}: {reason}": None for reason in access.reasons}
        rows.append([_text(column.title), *cells])
    yield from _table("Access to the column where it is encrypted", ["Column", *map(_text, report.readers)], rows)
    if reasons:
        yield "<p>Why not:</p>"
        yield _path_list(list(reasons), "")


def _timeline(report: ProtectionReport) -> Iterator[str]:
    yield "<h2>Time line of key versions</h2>"
    yield (
        "<p>Creation times are stated by the KMS. First and last file are modification times of the files "
        "that need the key: the file system states them, and nothing authenticates them.</p>"
    )
    yield '<div class="wide" role="region" aria-label="Drawing of the time line" tabindex="0">'
    yield from _chart(report)
    yield "</div>"
    rows = (
        [
            _text(_key_title(report, position)),
            _cell(_created_text(key), "" if key.created_note else "time"),
            _cell(f"{key.files:,}", "number"),
            _cell(key.first_modified or "unknown", "time"),
            _cell(key.last_modified or "unknown", "time"),
        ]
        for position, key in enumerate(report.keys)
    )
    yield from _table("Keys that files need", ["Key", "Created", "Files", "First file", "Last file"], rows)
    versions = (
        [_text(v.key), _cell(v.version or "the master key"), _cell(v.created, "time")] for v in report.timeline
    )
    if report.timeline:
        label = "All versions of these master keys that the KMS states, oldest first"
        yield from _table(label, ["Master key", "Version", "Created"], versions)


_CHART_WIDTH, _LABEL_WIDTH, _ROW_HEIGHT = 1000, 60, 26


def _chart(report: ProtectionReport) -> Iterator[str]:
    """Yield a drawing: a line from the creation of each key to its last file, and a bar for its files."""
    times = [key.created for key in report.keys] + [key.last_modified for key in report.keys]
    times += [key.first_modified for key in report.keys]
    known = sorted(time for time in times if time is not None)
    if not known:
        return
    first, last = datetime.fromisoformat(known[0]), datetime.fromisoformat(known[-1])
    seconds = (last - first).total_seconds() or 1.0

    def place(time: str) -> float:
        share = (datetime.fromisoformat(time) - first).total_seconds() / seconds
        return round(_LABEL_WIDTH + share * (_CHART_WIDTH - _LABEL_WIDTH - 20), 1)

    height = _ROW_HEIGHT * (len(report.keys) + 1)
    label = "Time line: when each key was created (circle), and when its files were written (bar)"
    yield f'<svg viewBox="0 0 {_CHART_WIDTH} {height}" role="img" aria-label="{label}">'
    for row, key in enumerate(report.keys):
        y = _ROW_HEIGHT * row + 14
        yield f'<text x="0" y="{y + 5}" font-size="14">K{row + 1}</text>'
        begin = key.created or key.first_modified
        if begin and key.last_modified:
            yield f'<line x1="{place(begin)}" x2="{place(key.last_modified)}" y1="{y}" y2="{y}" stroke="#555"/>'
        if key.first_modified and key.last_modified:
            x = place(key.first_modified)
            width = max(4.0, round(place(key.last_modified) - x, 1))
            yield f'<rect x="{x}" y="{y - 6}" width="{width}" height="12" fill="#1f5f99"/>'
        if key.created:
            yield f'<circle cx="{place(key.created)}" cy="{y}" r="6" fill="#fff" stroke="#1b1b1b"/>'
    y = height - 6
    yield f'<text x="{_LABEL_WIDTH}" y="{y}" font-size="14">{_text(known[0])}</text>'
    yield f'<text x="{_CHART_WIDTH}" y="{y}" font-size="14" text-anchor="end">{_text(known[-1])}</text>\n</svg>'


def _all_files(report: ProtectionReport) -> Iterator[str]:
    yield "<h2>Files</h2>"
    yield f'<p class="paper">The list of all {len(report.files):,} files is not printed.</p>'
    yield f'<details class="files"><summary>All {len(report.files):,} files</summary>'
    rows = (
        [
            _text(file.path),
            _cell(file.modified or "unknown", "time"),
            _cell(", ".join(f"K{position + 1}" for position in file.keys) if file.encrypted else "plaintext"),
            _cell(file.problem),
        ]
        for file in report.files
    )
    headings = ["File", "Modification time (not authenticated)", "Keys", "Problem"]
    yield from _table("Parquet files", headings, rows)
    yield "</details>"
