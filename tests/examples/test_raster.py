"""The example of a raster: it goes on where it was stopped, and gives the values of the model."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from unittest import mock

import pytest
from support.places import EXAMPLES


def test_it_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    example = runpy.run_path(str(EXAMPLES / "raster.py"))
    write = example["Scores"].__call__

    def stop(self: object, first_row: int, rows: object) -> None:
        if first_row > 0:
            raise KeyboardInterrupt
        write(self, first_row, rows)

    with mock.patch.object(example["Scores"], "__call__", stop), pytest.raises(KeyboardInterrupt):
        example["main"](pixels=256, budget="2MiB")
    example["main"](pixels=256, budget="2MiB")
    told = capsys.readouterr().out
    (before,) = re.findall(r"^([1-9]\d*) of 256 rows are there", told, re.MULTILINE)
    assert int(before) < 256
    difference = re.search(r"on a part of the raster: (\S+)", told)
    assert difference is not None
    assert float(difference[1]) < 1e-4
