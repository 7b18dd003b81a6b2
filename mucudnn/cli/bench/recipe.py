"""``mucudnn bench recipe``: run experiments that are described in TOML files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mucudnn.cli.shared import options
from mucudnn.cli.shared.commands import FileCommand, Outputs
from mucudnn.cli.shared.options import outputs
from mucudnn.cli.shared.parameters import NamedOrFile
from mucudnn.core.errors import InvalidInputError

if TYPE_CHECKING:
    from mucudnn.bench.suites.recipe import Recipe
    from mucudnn.core.tables import Table

_FAILED = 1


@click.command(cls=FileCommand)
@click.argument("name", metavar="[NAME|FILE]", type=NamedOrFile(), required=False)
@options.database
@options.known_threads
@options.known_device
@outputs("out")
@click.pass_context
def recipe(context: click.Context, /, name: str | None, outputs: Outputs, **given: Any) -> None:
    """Run the recipe FILE, or an included one by NAME, into the folder of --out, and check its criteria.

    Without a name, list the included recipes, the experiments of the paper. A recipe runs one command with fixed
    options, once for each combination of the others (docs/benchmarks.md). Exit status 1 if a criterion is not met.
    """
    from mucudnn.bench.results.reading import read_folder
    from mucudnn.bench.suites.recipe import find_recipe, judge, read_recipe
    from mucudnn.core.tables import new_table

    if name is None:
        outputs.tell(_listed())
        return
    if outputs.out is None:
        raise click.UsageError("a recipe needs a folder for its results: add --out DIR", context)
    path = find_recipe(name)
    read = read_recipe(path, given["device"].partition(":")[0])
    for run, words, inner in [*_runs(context, path, read, outputs.out, given)]:
        outputs.tell(f"{run}: mucudnn {read.command} {' '.join(words)}")
        with inner:
            inner.command.invoke(inner)
    folders = {run: read_folder(outputs.out / run) for run in read.runs}
    verdicts = [judge(criterion, folders) for criterion in read.criteria]
    printed = new_table(read.title, ("criterion", "bound", "measured", "verdict"), ())
    for one in verdicts:
        printed.add_row(one.criterion.name, str(one.criterion), one.measured, "met" if one.passed else "NOT MET")
    outputs.tell(printed, *(f"published elsewhere: {one}" for one in read.published))
    if not all(one.passed for one in verdicts):
        context.exit(_FAILED)


def _runs(
    context: click.Context, path: Path, read: Recipe, out: Path, given: Mapping[str, Any]
) -> Iterator[tuple[str, list[str], click.Context]]:
    """Yield the name, the words and the context of each run of a recipe's command.

    Raises ``InvalidInputError`` for a command that writes no result folder, and for options that it refuses.
    """
    command: click.Command | None = context.find_root().command
    for part in read.command.split():
        command = command.get_command(context, part) if isinstance(command, click.Group) else None
    known = {str(param.name): param for param in command.params} if command else {}
    if command is None or "out" not in known or command is context.command:
        raise InvalidInputError(f"{path}: [fixed] command is {read.command!r}; name a command with --out")
    passed = {key: str(value) for key, value in given.items() if key in known and value is not None}
    for run, own in read.runs.items():
        words = [*_words({**own, **passed, "out": str(out / run)}, known)]
        try:
            yield run, words, command.make_context(command.name, [*words], parent=context)
        except click.UsageError as error:
            raise InvalidInputError(f"{path}: {error.format_message()}") from None


def _words(own: Mapping[str, Any], known: Mapping[str, click.Parameter]) -> Iterator[str]:
    """Yield options and arguments as they are written on a command line."""
    for key, value in own.items():
        if isinstance(known.get(key), click.Argument):
            yield str(value)
        elif isinstance(value, bool):
            yield f"--{key}" if value else f"--no-{key}"
        else:
            yield f"--{key}={value}"


def _listed() -> Table:
    from mucudnn.bench.suites.recipe import read_recipe, shipped_recipes
    from mucudnn.core.tables import new_table

    every = shipped_recipes()
    printed = new_table("", ("recipe", "what it shows"), ("about",))
    for name, path in every.items():
        read = read_recipe(path)
        printed.add_row(name, read.title, read.takes)
    printed.caption = f"to start your own, copy a file of {next(iter(every.values())).parent}"
    return printed
