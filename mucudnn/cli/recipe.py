"""``mucudnn recipe``: run experiments that are described in TOML files."""

from __future__ import annotations

from pathlib import Path

import click

from mucudnn.cli.shared import options
from mucudnn.cli.shared.outputs import Outputs, outputs
from mucudnn.terminal.files import FileCommand, NamedOrFile

_FAILED = 1


@click.group()
def recipe() -> None:
    """Experiments as TOML files: fixed settings, varied ones, and criteria for the results (docs/benchmarks.md)."""


@recipe.command("list", cls=FileCommand)
def list_recipes() -> None:
    """List the recipes of the paper's experiments, and roughly how long each takes on two CPU cores."""
    from mucudnn.bench.recipes.recipe_file import shipped_recipes
    from mucudnn.bench.recipes.sections import read_sections
    from mucudnn.bench.report.tables import new_table
    from mucudnn.terminal.console import output

    printed = new_table("", ("recipe", "what it shows"), ("about",))
    for name, path in shipped_recipes().items():
        values = read_sections(path).values
        printed.add_row(name, values["title"], values["takes"])
    output().print(printed)


@recipe.command(cls=FileCommand)
@click.argument("name", metavar="NAME", type=NamedOrFile())
def show(name: str) -> None:
    """Print the recipe NAME, as a start for your own: mucudnn recipe show NAME > mine.toml."""
    from mucudnn.bench.recipes.recipe_file import find_recipe
    from mucudnn.bench.recipes.sections import read_sections

    click.echo(read_sections(find_recipe(name)).text, nl=False)


@recipe.command(cls=FileCommand)
@click.argument("name", metavar="FILE", type=NamedOrFile())
@options.database
@options.threads
@options.device
@outputs("out", required=True)
@click.pass_context
def run(context: click.Context, name: str, database: Path | None, device: str, outputs: Outputs) -> None:
    """Run the recipe FILE, or a shipped one by name: measure its grid, check its criteria.

    Exit status 1 if a criterion is not met. DIR gets a result folder for each network, recipe.toml and outcome.json.
    """
    from mucudnn.bench.recipes.benchmarks import Place
    from mucudnn.bench.recipes.recipe_file import find_recipe, read_recipe
    from mucudnn.bench.recipes.running import criteria_table, published_in_words, results_table, run_recipe
    from mucudnn.words.progress import progress_bar

    read = read_recipe(find_recipe(name), device)
    with progress_bar() as progress:
        outcome = run_recipe(read, outputs.folder, Place(device, database, progress))
    outputs.tell(
        results_table(outcome),
        criteria_table(outcome),
        *outcome.notes,
        published_in_words(outcome),
    )
    if not outcome.passed:
        context.exit(_FAILED)
