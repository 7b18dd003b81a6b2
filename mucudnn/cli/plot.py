"""``mucudnn plot``: one picture of a result folder, as a file."""

from __future__ import annotations

from pathlib import Path

import click

from mucudnn.cli.shared import options
from mucudnn.terminal.command_files import FileCommand, InputFolder, OutputFile
from mucudnn.words.errors import InvalidInputError

_KINDS = ("speedups", "limits", "samples", "cuts")


@click.command(cls=FileCommand)
@click.argument("kind", type=click.Choice(_KINDS))
@click.argument("folder", metavar="DIR", type=InputFolder("DIR"))
@click.option(
    "--out",
    required=True,
    type=OutputFile("FILE.png|svg", suffix=(".png", ".svg")),
    help="The file to draw into.",
)
@click.option(
    "--layer",
    "layers",
    type=options.Text("NAME", str),
    multiple=True,
    help="Only this layer; may be given several times.",
)
def plot(kind: str, folder: Path, out: Path, layers: tuple[str, ...]) -> None:
    """Draw one picture of the result folder DIR, as the page of mucudnn report has it.

    \b
    speedups  speedup over torch of each layer, under each workspace limit
    limits    rates against the machine's limits, and time over them by kind of layer
    samples   every sample of each contestant, for the operations that take torch longest
    cuts      how the mini-batch of each layer is cut
    """
    from mucudnn.bench.folders.reading import read_folder
    from mucudnn.bench.pages.measured import measured
    from mucudnn.bench.pages.pictures.drawn import write_picture

    rows = measured(read_folder(folder))
    if layers:
        names = list(dict.fromkeys(rows["layer"])) if "layer" in rows else []
        if unknown := [name for name in layers if name not in names]:
            raise InvalidInputError(f"{folder} has no layer {unknown[0]!r}; it has {', '.join(names) or 'no layers'}")
        rows = rows[rows["layer"].isin(layers)]
    if not write_picture(kind, rows, out):
        raise InvalidInputError(
            f"{folder} has nothing for a picture of {kind}: mucudnn report {folder} shows what it has"
        )
