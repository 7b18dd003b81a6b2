"""Shows what a benchmark measured: its tables, and the files of ``--json`` and ``--csv``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from mucudnn.words.errors import InvalidInputError, OutputError

if TYPE_CHECKING:
    from rich.table import Table

    from mucudnn.bench.folders.reading import ResultFolder


@contextmanager
def shown(
    out: Path | None,
    tables: Callable[[ResultFolder], Iterable[Table | str]],
    json_file: Path | None = None,
    csv_file: Path | None = None,
) -> Iterator[Path]:
    """Yield the result folder that a benchmark is to write; then print and write what it has, however that ended.

    out: the folder of ``--out``; ``None``: a temporary one. tables: makes what is printed, from the folder.
    """
    with ExitStack() as stack:
        folder = out or Path(stack.enter_context(TemporaryDirectory(prefix="mucudnn-")))
        try:
            yield folder
        except (InvalidInputError, OutputError):
            raise
        except BaseException:
            _show(folder, tables, json_file, csv_file)
            raise
        _show(folder, tables, json_file, csv_file)


def _show(
    path: Path,
    tables: Callable[[ResultFolder], Iterable[Table | str]],
    json_file: Path | None,
    csv_file: Path | None,
) -> None:
    from mucudnn.bench.folders.header import HEADER_FILE
    from mucudnn.bench.folders.reading import flat_rows, read_folder
    from mucudnn.bench.report.export import write_csv, write_each, write_json
    from mucudnn.terminal.console import output

    if not (path / HEADER_FILE).exists():
        return
    folder = read_folder(path)
    write_each(
        (csv_file, partial(write_csv, rows=[*flat_rows(folder)])),
        (json_file, partial(write_json, record=folder.to_json())),
    )
    console = output()
    for told in tables(folder) if folder.lines else ():
        if told != "":
            console.print(told, soft_wrap=isinstance(told, str))
    console.print(str(folder.header.environment))
