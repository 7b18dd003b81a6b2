"""``mucudnn bench compare``: two result folders side by side."""

from __future__ import annotations

import re
from pathlib import Path

import click

from mucudnn.cli.shared import options, parameters
from mucudnn.cli.shared.commands import FileCommand
from mucudnn.cli.shared.parameters import FOLDER
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.values import shown

_SLOWER = 1  # exit status


def parse_tolerance(text: str) -> float:
    """Parse a percentage as a fraction. Raises ``InvalidInputError`` for other text.

    >>> parse_tolerance("5%"), parse_tolerance("2.5 %")
    (0.05, 0.025)
    """
    match = re.fullmatch(r"\s*([0-9]{1,3}(?:\.[0-9]{1,9})?)\s*%\s*", text)
    if match is None:
        raise InvalidInputError(f"{shown(text)} is not a percentage; write for example 5%")
    return float(match.group(1)) / 100


@click.command(cls=FileCommand)
@click.argument("before", type=FOLDER)
@click.argument("after", type=FOLDER)
@options.option("tolerance", parameters.Text("PERCENT", parse_tolerance), "Ignore changes up to this size.", "5%")
@options.flag("all", "Also show rows that are the same or undecided.", "all_rows")
@click.pass_context
def compare(context: click.Context, *, before: Path, after: Path, tolerance: float, all_rows: bool) -> None:
    """Compare the result folder AFTER with BEFORE: rows that became faster or slower, are the same, or are undecided.

    Verdicts take the spread of the samples into account. If PyTorch and the machine are the same in both folders, times
    are compared relative to PyTorch's in the same round. Exit status 1: a row became slower by more than the tolerance;
    2: no row is in both.
    """
    from mucudnn.bench.results.comparison import Verdict, compare_folders, comparison_table, in_words
    from mucudnn.bench.results.reading import read_folder
    from mucudnn.core.terminal import output

    comparison = compare_folders(read_folder(before), read_folder(after), tolerance)
    console, table = output(), comparison_table(comparison, all_rows=all_rows)
    if table.rows:
        console.print(table)
    console.print(in_words(comparison), soft_wrap=True)
    if not comparison.rows:
        raise InvalidInputError(f"{before} and {after} have no row in common; name folders of the same layers")
    if comparison.of(Verdict.SLOWER):
        context.exit(_SLOWER)
