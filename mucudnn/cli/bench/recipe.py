"""``mucudnn bench recipe``: run experiments that are described in TOML files."""

from __future__ import annotations

from typing import Any

import click

from mucudnn.cli.shared import options
from mucudnn.cli.shared.commands import FileCommand, Outputs
from mucudnn.cli.shared.options import outputs
from mucudnn.cli.shared.parameters import NAMED_OR_FILE
from mucudnn.core.errors import InvalidInputError

_FAILED = 1


@click.command(cls=FileCommand)
@click.argument("name", metavar="[NAME|FILE]", type=NAMED_OR_FILE, required=False)
@options.database
@options.known_threads
@options.known_device
@outputs("out")
@click.pass_context
def recipe(context: click.Context, /, name: str | None, outputs: Outputs, **common: Any) -> None:
    """Run the recipe FILE, or an included one by NAME, into the folder of --out, and check its criteria.

    Without a name, list the included recipes, of the paper and of training steps. A recipe runs one command with fixed
    options, once for each combination of the others (docs/benchmarks.md). Exit status 1 if a criterion is not met.
    """
    from mucudnn.bench.results.reading import read_folder
    from mucudnn.bench.suites.recipe import SHIPPED, judge, read_recipe
    from mucudnn.core.tables import new_table

    if name is None:
        printed = new_table("", ("recipe", "what it shows"), ("about",))
        for shipped, path in SHIPPED.items():
            experiment = read_recipe(shipped)
            printed.add_row(shipped, experiment.title, experiment.takes)
            printed.caption = f"to start your own, copy a file of {path.parent}"
        outputs.tell(printed)
        return
    experiment = read_recipe(name, common["device"].partition(":")[0])
    if outputs.out is None:
        raise click.UsageError("a recipe needs a folder for its results: add --out DIR", context)

    # Find the command, and have it read the options of every run before the first one starts.
    command: click.Command | None = context.find_root().command
    for word in experiment.command.split():
        command = command.get_command(context, word) if isinstance(command, click.Group) else None
    params = {str(param.name): param for param in command.params} if command is not None else {}
    if command is None or "out" not in params or command is context.command:
        raise InvalidInputError(f"{name}: [fixed] command is {experiment.command!r}; name a command with --out")
    passed = {key: str(value) for key, value in common.items() if key in params and value is not None}
    runs = []
    for run, chosen in experiment.runs.items():
        values = {**chosen, **passed, "out": str(outputs.out / run)}
        words = [word for key, value in values.items() for word in _words(key, value, params.get(key))]
        try:
            runs.append((run, words, command.make_context(command.name, [*words], parent=context)))
        except click.UsageError as error:
            raise InvalidInputError(f"{name}: {error.format_message()}") from None

    # Run it, and judge what it measured.
    for run, words, run_context in runs:
        outputs.tell(f"{run}: mucudnn {experiment.command} {' '.join(words)}")
        with run_context:
            command.invoke(run_context)
    folders = {run: read_folder(outputs.out / run) for run in experiment.runs}
    printed = new_table(experiment.title, ("criterion", "bound", "measured", "verdict"), ())
    verdicts = [judge(criterion, folders) for criterion in experiment.criteria]
    for criterion, (measured, is_met) in zip(experiment.criteria, verdicts, strict=True):
        printed.add_row(criterion.name, str(criterion), measured, "met" if is_met else "NOT MET")
    outputs.tell(printed, *(f"published elsewhere: {result}" for result in experiment.published))
    if not all(is_met for _, is_met in verdicts):
        context.exit(_FAILED)


def _words(key: str, value: Any, param: click.Parameter | None) -> list[str]:
    """Return an option, or the values of an argument, as they are written on a command line."""
    if isinstance(param, click.Argument):
        return [str(value)] if param.nargs == 1 else str(value).split(",")
    if isinstance(value, bool):
        return [f"--{key}" if value else f"--no-{key}"]
    return [f"--{key}={value}"]
