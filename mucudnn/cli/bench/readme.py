"""``mucudnn bench readme``: README's figures on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from mucudnn.cli.shared import options
from mucudnn.cli.shared.commands import FileCommand
from mucudnn.cli.shared.parameters import OutputFile
from mucudnn.core.files import write_json


@click.command(cls=FileCommand)
@options.option("json", OutputFile(), "JSON file of the results, to send.", "mucudnn-readme.json", "json_file")
@options.database
@options.threads
def readme(json_file: Path, database: Path | None) -> None:
    """Measure README's figures on this machine, beside what README says of another, in less than two minutes.

    All convolutions of a ResNet-18, a training step, one within half the memory, and one image: PyTorch and mucudnn
    interleaved. The file has the machine, versions, date, and every sample.
    """
    from mucudnn.bench.suites.readme import measured_readme, published_readme, readme_table
    from mucudnn.core.terminal import output, progress_bar

    with progress_bar() as progress:
        record = measured_readme(database, progress)
    write_json(json_file, record)
    console = output()
    console.print(readme_table(record, published_readme()))
    console.print(f"after {record['took_s']:.0f} s; all samples are in {json_file}", soft_wrap=True)
