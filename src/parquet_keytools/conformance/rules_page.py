"""The rules as a page of the documentation.

python -m parquet_keytools.conformance.rules_page > docs/rules.md
"""

from __future__ import annotations

from parquet_keytools.conformance.rules import RULES, Scope, Severity

_TITLES = {
    Scope.ENVELOPE: "What is visible without any key",
    Scope.FOOTER: "The footer",
    Scope.COLUMN: "Columns",
    Scope.CONFIGURATION: "What the configuration asks for",
    Scope.DATA_SET: "Data sets",
}

_INTRODUCTION = """\
# Rules

What `parquet-keytools verify` checks. Sections are those of the Parquet encryption specification; `data-pages.md`
and `parquet.thrift` belong to the Parquet format; PKMT1 is the key material that parquet-java and Arrow write, of
which the specification says nothing. A **violation** breaks the specification, or is not what was asked for; a
**weakness** is legal and protects less than it could; a **note** is neither. This page is made from the table in
`conformance/rules.py`.
"""


def rules_page() -> str:
    """Return the page as Markdown."""
    parts = [_INTRODUCTION]
    for scope, title in _TITLES.items():
        parts.append(
            f"\n## {title}\n\n| rule | section | what must hold | where it does not |\n| --- | --- | --- | --- |\n"
        )
        for severity in Severity:
            for rule in RULES:
                if rule.scope is scope and rule.severity is severity:
                    name = f"`{rule.id}` ({severity.value})"
                    parts.append(f"| {name} | {rule.section} | {rule.holds} | {rule.gain} |\n")
    return "".join(parts)


if __name__ == "__main__":
    print(rules_page(), end="")
