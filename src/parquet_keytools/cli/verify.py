"""`parquet-keytools verify`."""

# Nothing slow is imported here: `--help` has to answer at once.
from __future__ import annotations

import contextlib
import errno
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from parquet_keytools.cli.options import CONFIG_VARIABLE, AadPrefixOption, JsonOption, PathsArgument, TableOption

OptionalConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        envvar=CONFIG_VARIABLE,
        help="The YAML configuration: its keys, and the table to compare with.",
    ),
]
PartsOption = Annotated[
    int | None, typer.Option("--parts", metavar="N", min=1, help="The folder must have parts 0 to N-1, each once.")
]


def verify_command(
    paths: PathsArgument,
    config: OptionalConfigOption = None,
    table: TableOption = None,
    aad_prefix: AadPrefixOption = None,
    parts: PartsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check files against the encryption specification, rule by rule.

    Without a configuration, what needs no key is checked, and nothing is authenticated. With one, every module is,
    and the file is compared with what its table wants. A folder is checked as one data set. The exit status is 0
    only if everything that was asked for was checked and conforms.
    """
    from parquet_keytools.cli.failures import ExitStatus
    from parquet_keytools.cli.options import locations_of
    from parquet_keytools.cli.output import file_counter, print_json
    from parquet_keytools.cli.verify_report import say_data_set, say_file
    from parquet_keytools.conformance import verification
    from parquet_keytools.conformance.report import data_set_document, file_document
    from parquet_keytools.keytools import Keytools

    if table is not None and config is None:
        raise typer.BadParameter("--table needs --config.")
    location = locations_of(paths, "PATH")
    kind = location.info().type.name
    if parts is not None and kind == "File":
        raise typer.BadParameter("parts are files of a folder, and PATH is one file.")
    if kind == "NotFound":
        raise FileNotFoundError(errno.ENOENT, "no such file or folder", paths[0])
    with contextlib.ExitStack() as stack:
        verify_folder = partial(verification.verify_folder, None)
        verify_file = partial(verification.verify_file, None)
        if config is not None:
            keytools = stack.enter_context(Keytools.from_yaml(config))
            if table is not None:
                keytools.configuration.select_table(table)
            verify_folder = partial(keytools.verify_folder, table_name=table)
            verify_file = partial(keytools.verify_file, table_name=table)
        if kind == "Directory":
            with file_counter() as count:
                data_set = verify_folder(location, aad_prefix=aad_prefix, part_count=parts, on_progress=count)
            print_json(data_set_document(data_set)) if as_json else say_data_set(data_set)
            conforms = data_set.conforms
        else:
            report = verify_file(location, aad_prefix=aad_prefix)
            print_json(file_document(report)) if as_json else say_file(report)
            conforms = report.conforms
    if not conforms:
        raise typer.Exit(ExitStatus.NO)
