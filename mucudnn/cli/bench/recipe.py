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
def recipe(context: click.Context, /, name: str | None, outputs: Outputs, **given: Any) -> None:
    """Run the recipe FILE, or an included one by NAME, into the folder of --out, and check its criteria.

    Without a name, list the included recipes, the experiments of the paper. A recipe runs one command with fixed
    options, once for each combination of the others (docs/benchmarks.md). Exit status 1 if a criterion is not met.
    """
    from mucudnn.bench.results.reading import read_folder
    from mucudnn.bench.suites.recipe import SHIPPED, judge, read_recipe
    from mucudnn.core.tables import new_table

    if name is None:
        printed = new_table("", ("recipe", "what it shows"), ("about",))
        for each in SHIPPED:
            read = read_recipe(each)
            printed.add_row(each, read.title, read.takes)
        printed.caption = f"to start your own, copy a file of {SHIPPED[each].parent}"
        outputs.tell(printed)
        return
    read = read_recipe(name, given["device"].partition(":")[0])
    if outputs.out is None:
        raise click.UsageError("a recipe needs a folder for its results: add --out DIR", context)
    command: click.Command | None = context.find_root().command
    for part in read.command.split():
        command = command.get_command(context, part) if isinstance(command, click.Group) else None
    known = {str(param.name): param for param in command.params} if command else {}
    if command is None or "out" not in known or command is context.command:
        raise InvalidInputError(f"{name}: [fixed] command is {read.command!r}; name a command with --out")
    passed = {key: str(value) for key, value in given.items() if key in known and value is not None}
    runs = []
    for run, own in read.runs.items():
        words = []
        for key, value in {**own, **passed, "out": str(outputs.out / run)}.items():
            if isinstance(known.get(key), click.Argument):
                words.append(str(value))
            elif isinstance(value, bool):
                words.append(f"--{key}" if value else f"--no-{key}")
            else:
                words.append(f"--{key}={value}")
        try:
            runs.append((run, words, command.make_context(command.name, [*words], parent=context)))
        except click.UsageError as error:
            raise InvalidInputError(f"{name}: {error.format_message()}") from None
    for run, words, inner in runs:
        outputs.tell(f"{run}: mucudnn {read.command} {' '.join(words)}")
        with inner:
            command.invoke(inner)
    folders = {run: read_folder(outputs.out / run) for run in read.runs}
    printed = new_table(read.title, ("criterion", "bound", "measured", "verdict"), ())
    verdicts = [judge(criterion, folders) for criterion in read.criteria]
    for criterion, (measured, is_met) in zip(read.criteria, verdicts, strict=True):
        printed.add_row(criterion.name, str(criterion), measured, "met" if is_met else "NOT MET")
    outputs.tell(printed, *(f"published elsewhere: {one}" for one in read.published))
    if not all(is_met for _, is_met in verdicts):
        context.exit(_FAILED)
