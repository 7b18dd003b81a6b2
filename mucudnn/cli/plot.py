"""``mucudnn plot``: draw one picture of a result folder into a file."""

from __future__ import annotations

from pathlib import Path

import click

from mucudnn.bench.pages.kinds import KINDS
from mucudnn.cli.shared import parameters
from mucudnn.terminal.files import FileCommand, OutputFile, ResultFolder

_LIST = "\n".join(f"{name:<14}{kind.summary}" for name, kind in KINDS.items())


@click.command(
    cls=FileCommand,
    help=f"Draw one picture of the result folder DIR, as on the page of mucudnn report.\n\n\b\n{_LIST}",
)
@click.argument("kind", type=click.Choice([*KINDS]))
@click.argument("folder", metavar="DIR", type=ResultFolder())
@click.option(
    "--out",
    metavar="FILE.png|svg",
    required=True,
    type=OutputFile(suffix=(".png", ".svg")),
    help="Image file to write.",
)
@click.option(
    "--layer",
    "layers",
    type=parameters.Text("NAME", str),
    multiple=True,
    help="Draw only this layer; may be repeated.",
)
def plot(kind: str, folder: Path, out: Path, layers: tuple[str, ...]) -> None:
    from mucudnn.bench.folders.reading import read_folder
    from mucudnn.bench.pages.pictures import write_picture

    write_picture(kind, read_folder(folder), out, layers)
