"""Output of commands: printed tables, and the files for ``--csv``, ``--json`` and ``--out``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from mucudnn.bench.results.export import write_csv, write_each, write_json
from mucudnn.cli.shared import options
from mucudnn.cli.shared.files import OutputFile, OutputFolder
from mucudnn.cli.shared.options import Decorator, bundled
from mucudnn.core.errors import InvalidInputError, OutputError

if TYPE_CHECKING:
    from rich.table import Table

    from mucudnn.bench.results.reading import ResultFolder

_OUT_HELP = "Keep all samples in this result folder. Run the same command again to resume."


@dataclass(frozen=True, slots=True)
class Outputs:
    """The output files requested by ``--csv``, ``--json`` and ``--out``."""

    csv_file: Path | None = None
    json_file: Path | None = None
    out: Path | None = None

    def tell(
        self, *printed: Table | str, rows: Sequence[Mapping[str, Any]] = (), record: Mapping[str, Any] | None = None
    ) -> None:
        """Write results to the requested files, then print them, even if writing fails.

        printed: tables and texts. rows: the rows of the CSV file. record: the object of the JSON file.
        """
        from mucudnn.bench.results.text_tables import output

        try:
            write_each(
                (self.csv_file, partial(write_csv, rows=rows)),
                (self.json_file, partial(write_json, record=record or {})),
            )
        finally:
            console = output()
            for each in printed:
                if each != "":
                    console.print(each, soft_wrap=isinstance(each, str))

    @contextmanager
    def shown(self, tables: Callable[[ResultFolder], Iterable[Table | str]]) -> Iterator[Path]:
        """Yield a result folder for a benchmark to write to; then show its results, even after an exception.

        The folder is given by ``--out``, or temporary. tables: makes what is printed of the folder's content.
        """

        def show() -> None:
            from mucudnn.bench.results.header import HEADER_FILE
            from mucudnn.bench.results.reading import read_folder

            if (path / HEADER_FILE).exists():
                folder = read_folder(path)
                nothing = [f"nothing was measured: {reason}" for reason in folder.left_out_by_reason]
                self.tell(str(folder.header.environment), *(tables(folder) if folder.lines else nothing))

        with ExitStack() as stack:
            path = self.out or Path(stack.enter_context(TemporaryDirectory(prefix="mucudnn-")))
            try:
                yield path
            except (InvalidInputError, OutputError):
                raise
            except BaseException:
                show()
                raise
            show()


def outputs(*kinds: str) -> Decorator:
    """Return a decorator that adds some of the options ``--csv``, ``--json`` and ``--out`` to a command.

    kinds: the options. The command gets their values as one argument, ``outputs``.
    """
    every: dict[str, Decorator] = {
        "csv": options.option("csv", OutputFile(), "Also write the numbers to this CSV file.", variable="csv_file"),
        "json": options.option("json", OutputFile(), "Also write the results to this JSON file.", variable="json_file"),
        "out": click.option("--out", type=OutputFolder(), help=_OUT_HELP),
    }
    return bundled("outputs", Outputs, *(every[kind] for kind in kinds))
