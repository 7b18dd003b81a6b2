"""Runs a recipe (an experiment in a TOML file) into a folder: results of each cell, then judgements.

A cell is one result folder. A recipe that is run again into its folder resumes where it stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import nan
from pathlib import Path

import pandas
from rich.table import Table

from mucudnn.bench.contests.variants import TORCH
from mucudnn.bench.folders.reading import ResultFolder, read_folder
from mucudnn.bench.recipes.benchmarks import Place
from mucudnn.bench.recipes.criteria import size_in_words
from mucudnn.bench.recipes.judging import Judgement, all_rows, groups, judge, speedup
from mucudnn.bench.recipes.recipe_file import RecipeFile
from mucudnn.bench.report.export import write_json
from mucudnn.bench.report.tables import milliseconds, new_table, ratio, some
from mucudnn.terminal.files import whole_text
from mucudnn.words.errors import OutputError
from mucudnn.words.progress import share_of

RECIPE_FILE, OUTCOME_FILE = "recipe.toml", "outcome.json"
_FORMAT_VERSION = 1  # format version of the outcome file


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """The outcome of running a recipe: its rows and judgements.

    notes: messages about everything that was left out, or could not be read.

    rows: those of all folders, see ``all_rows``.
    """

    recipe: RecipeFile
    rows: pandas.DataFrame
    judgements: tuple[Judgement, ...]
    notes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return all(one.passed for one in self.judgements)


def run_recipe(recipe: RecipeFile, out: Path, place: Place) -> Outcome:
    """Measure the results of a recipe that the folder ``out`` still lacks, then judge them.

    Raises ``OutputError`` if the folder does not belong to this recipe, all errors of the benchmark, and
    ``KeyboardInterrupt``, after which the folder has all results so far.
    """
    _prepare(out, recipe.text)
    cells = recipe.cells()
    for index, cell in enumerate(cells):
        part = share_of(place.progress, index / len(cells), 1 / len(cells))
        recipe.benchmark.run(cell, out / cell.name, replace(place, progress=part))
    folders = {cell.name: read_folder(out / cell.name) for cell in cells}
    outcome = judged(recipe, folders)
    write_json(out / OUTCOME_FILE, _record(outcome))
    return outcome


def _prepare(out: Path, recipe: str) -> None:
    """Create the folder ``out`` and write the recipe into it. Raises ``OutputError`` if it has other contents."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        strange = sorted(one.name for one in out.iterdir())
    except OSError as error:
        raise OutputError(f"{out} cannot be created: {error.strerror}; name another folder") from error
    if strange and RECIPE_FILE not in strange:
        raise OutputError(f"{out} is not the folder of a recipe: it contains {strange[0]}; name a new or empty folder")
    with whole_text(out / RECIPE_FILE) as stream:
        stream.write(recipe)


def judged(recipe: RecipeFile, folders: dict[str, ResultFolder]) -> Outcome:
    """Judge result folders by a recipe's criteria."""
    rows = all_rows(folders)
    judgements = tuple(judge(criterion, rows) for criterion in recipe.criteria)
    return Outcome(recipe, rows, judgements, tuple(note for folder in folders.values() for note in _left_out(folder)))


def _left_out(folder: ResultFolder) -> list[str]:
    """Return a line for each reason why the benchmark left something out, and messages about unreadable results."""
    reasons = folder.left_out_by_reason.items()
    return [*(f"{folder.path.name}: left out, as {why}: {some(what)}" for why, what in reasons), *folder.problems]


def _record(outcome: Outcome) -> dict[str, object]:
    """Return the JSON object of an outcome: each criterion, its worst value, and whether it passed."""
    return {
        "format_version": _FORMAT_VERSION,
        "title": outcome.recipe.title,
        "published": list(outcome.recipe.published),
        "passed": outcome.passed,
        "criteria": [
            {
                "criterion": str(one.criterion),
                "value": one.value,
                "low": None if one.found is None else one.found.low,
                "high": None if one.found is None else one.found.high,
                "place": one.place,
                "passed": one.passed,
            }
            for one in outcome.judgements
        ],
        "notes": list(outcome.notes),
    }


def results_table(outcome: Outcome) -> Table:
    """Return a table of total times, with a row for each contestant, policy and limit of each folder."""
    printed = new_table(
        outcome.recipe.title,
        ("folder", "contestant", "policy", "workspace limit"),
        ("measured", "ms", "speedup over PyTorch", "largest workspace", "largest error"),
    )
    rows = outcome.rows
    torchs = rows[rows["contestant"] == TORCH]
    for group in groups(rows):
        timed = group.rows[group.rows["time_s"].notna()]
        over_torch = nan if group.contestant == TORCH else speedup(group.rows, torchs).value
        error = group.rows["relative_error"].max()
        printed.add_row(
            *(group.folder, group.contestant, group.policy or ""),
            _size(group.limit_bytes, "" if group.policy is None else "none"),
            f"{len(timed)} of {len(group.rows)}",
            "" if timed.empty else milliseconds(float((timed["time_s"] * timed["count"]).sum())),
            "" if pandas.isna(over_torch) else ratio(over_torch),
            _size(group.rows["workspace_bytes"].max(), ""),
            "" if pandas.isna(error) else f"{error:.1e}",
        )
    return printed


def criteria_table(outcome: Outcome) -> Table:
    """Return a table with a row for each criterion: whether it passed, and the worst value."""
    printed = new_table("", ("", "criterion", "found"), ())
    for one in outcome.judgements:
        printed.add_row("pass" if one.passed else "FAIL", str(one.criterion), str(one))
    return printed


def published_in_words(outcome: Outcome) -> str:
    """Return the published results that the recipe reproduces, one per line; an empty string if there are none."""
    return "\n".join(f"published elsewhere: {one}" for one in outcome.recipe.published)


def _size(value: float, missing: str) -> str:
    return missing if pandas.isna(value) else size_in_words(value)
