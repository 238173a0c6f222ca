"""`parquet-keytools tenants`: master keys of values of a placeholder, such as of tenants."""

# Nothing slow is imported here: `--help` must be fast.
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from parquet_keytools.cli.options import ConfigOption, JsonOption, TableOption, open_keytools
from parquet_keytools.cli.output import answer, print_json, to_dict

if TYPE_CHECKING:
    from parquet_keytools.files.tenant_keys import TenantKey

app = typer.Typer(name="tenants", help="Create the master keys of tenants in the KMS.", no_args_is_help=True)


@app.callback()
def _tenants() -> None:
    """Create the master keys of tenants in the KMS."""


@app.command()
def create(
    values: Annotated[list[str], typer.Argument(metavar="VALUE", help="Values of the placeholder.")],
    config: ConfigOption,
    table: TableOption = None,
    placeholder: Annotated[
        str | None,
        typer.Option("--placeholder", metavar="NAME", help="The placeholder, if the table has several."),
    ] = None,
    template: Annotated[
        Path | None,
        typer.Option(
            "--template",
            metavar="FILE",
            help="A YAML or JSON file with the `tags` and the `policy` of new keys, as far as the KMS has them. "
            "The placeholder in braces stands for the value.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Create the master keys of values, as the templates of a table name them.

    A master key that exists stays as it is. After an error, repeat the command.
    """
    given = {} if template is None else _template(template)
    found: list[TenantKey] = []

    def on_key(key: TenantKey) -> None:
        found.append(key)
        if not as_json:
            answer(f"{key.value}: {'created' if key.created else 'exists'}: {key.master_key_id}")

    try:
        with open_keytools(config) as keytools:
            keytools.create_tenant_keys(values, table_name=table, placeholder=placeholder, on_key=on_key, **given)
    finally:
        if as_json:
            print_json([to_dict(key) for key in found])


def _template(file: Path) -> dict[str, Any]:
    """Return the tags and the policy in a file."""
    from parquet_keytools.config.document import UnreadableYamlError, read_yaml
    from parquet_keytools.errors import ConfigurationError

    try:
        document = read_yaml(file.read_bytes())
    except UnreadableYamlError as error:
        raise ConfigurationError(f"it is not valid YAML: {error}", file=str(file)) from None
    found: dict[str, Any] = document.value
    is_valid = (
        not document.mistakes
        and isinstance(found, dict)
        and found.keys() <= {"tags", "policy"}
        and all(isinstance(part, dict) for part in found.values())
        and all(isinstance(tag, str) for tag in found.get("tags", {}).values())
    )
    if not is_valid:
        raise ConfigurationError(
            "it is not a template of master keys.",
            file=str(file),
            hint="It has `tags`, a mapping of names to texts, and `policy`, a mapping; both can be left out.",
        )
    return found
