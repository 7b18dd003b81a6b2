"""The commands through their real entry point: output, files, options for the choices of a config, imports."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from support.command_line import TUNE, invoke, one_layer

import mucudnn
from mucudnn.bench.sources import table_tuning
from mucudnn.bench.sources.layers import LayerTable, load_source
from mucudnn.bench.suites import training
from mucudnn.cli import doctor
from mucudnn.cli.shared import options
from mucudnn.core.config import Config
from mucudnn.core.problem import MemoryFormat


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    return one_layer(tmp_path)


def test_layers_lists_convolutions() -> None:
    result = invoke("layers", "alexnet", "--batch", "32")
    assert result.exit_code == 0
    assert "alexnet: 5 convolutions" in result.output
    assert "64×27×27" in result.output


def test_tune_prints_the_table_and_writes_the_record(layers: Path, tmp_path: Path) -> None:
    result = invoke("tune", layers, *TUNE, "--operations", "forward,backward-filter", "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    for expected in ("only", "forward", "backward_filter", "total", "speedup", "rel. error"):
        assert expected in result.output
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["complete"] is True
    assert [p["operation"] for p in record["problems"]] == ["forward", "backward_filter"]


def test_tune_hands_on_every_option(layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def stop(*given: object, **_: object) -> None:
        seen.extend(given)
        raise KeyboardInterrupt

    monkeypatch.setattr(table_tuning, "tune_table", stop)
    options = (
        "--batch 6 --memory-format channels-last --dtype bfloat16 --threads 1 --deterministic --strict --policy all"
    )
    options += " --workspace-limit 1.5MiB --operations forward --algorithms gemm,fft --max-relative-error 0.5"
    invoke("tune", layers, *options.split(), "--time-limit", "2min", "--database", tmp_path / "my.sqlite")
    table, config = seen
    (layer,) = table.layers
    assert (layer.batch_size, layer.problem.dtype) == (6, "bfloat16")
    assert layer.problem.memory_format is MemoryFormat.CHANNELS_LAST
    choices = {"policy": "all", "operations": "forward", "algorithms": ("gemm", "fft"), "max_relative_error": 0.5}
    expected = Config(workspace_limit="1.5MiB", time_limit="2min", deterministic=True, strict=True, **choices)  # type: ignore[arg-type]
    assert config == replace(expected, database=tmp_path / "my.sqlite")


def test_doctor_says_what_is_missing_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    result = invoke("doctor")
    assert result.exit_code == 0, result.output
    for expected in ("CPU", "threads", "oneDNN", "cuDNN", "pip install cupy-cuda13x", "native", "gemm", "fft"):
        assert expected in result.output


def test_warnings_are_one_line_without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def warn(*args: object, **kwargs: object) -> LayerTable:
        warnings.simplefilter("always")
        warnings.warn("look out", stacklevel=1)
        return load_source("alexnet", batch=1)

    monkeypatch.setattr("mucudnn.bench.sources.layers.load_source", warn)
    assert invoke("layers", "alexnet").stderr == "Warning: look out\n"


@pytest.mark.parametrize("command", [[], ["report"], ["bench", "convolutions"]])
def test_help_loads_nothing_heavy(command: list[str]) -> None:
    code = (
        f"import sys\ntry:\n    from mucudnn.cli.main import main; main({[*command, '--help']})\nfinally:\n"
        "    print([name for name in ('torch', 'rich', 'pandas', 'numpy') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "[]"
    assert " ".join(["Usage: -c", *command]) in output


# What must not be loaded before it is needed; asked of a fresh process.


def test_import_loads_nothing_heavy() -> None:
    code = (
        "import sys, mucudnn; mucudnn.Config(); mucudnn.Operation.FORWARD; mucudnn.InfeasibleError\n"
        "heavy = ('torch', 'cupy', 'pulp', 'pandas', 'rich', 'mucudnn.running.modules')\n"
        "print(*(name for name in heavy if name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


@pytest.mark.parametrize("name", mucudnn.__all__)
def test_every_export_is_there(name: str) -> None:
    assert getattr(mucudnn, name).__name__ == name
    assert name in dir(mucudnn)


def test_unknown_attribute_says_so() -> None:
    with pytest.raises(AttributeError, match="no attribute 'conv3d'"):
        _ = mucudnn.conv3d


# The choices of a config, as options: each has one, in the commands where it decides something.


TRAINING = ("bench", "training", "alexnet")


def names(command: click.Command) -> set[str]:
    return {str(parameter.name) for parameter in command.params}


def config_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Config:
    """What the command tunes with."""
    seen: list[Any] = []

    def stop(sources: object, batch_sizes: object, options: Any, *_: object, **__: object) -> None:
        seen.append(options.config)
        raise KeyboardInterrupt

    def stop_tuning(table: object, config: Config, **_: object) -> None:
        seen.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "benchmark_training", stop)
    monkeypatch.setattr(table_tuning, "tune_table", stop_tuning)
    result = invoke(*arguments)
    assert seen, result.output
    config: Config = seen[0]
    return config


def test_settings_that_a_command_does_not_offer_come_from_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those of measuring do; what the command itself has decided stays."""
    seen: list[Config] = []

    @click.command()
    @options.config("policy", deterministic=False)
    def command(config: Config) -> None:
        seen.append(config)

    for name, value in (("STRICT", "1"), ("TIME_LIMIT", "3s"), ("DETERMINISTIC", "1"), ("FUSE", "1")):
        monkeypatch.setenv(f"MUCUDNN_{name}", value)
    assert CliRunner().invoke(command, ["--policy", "all"]).exit_code == 0
    assert replace(seen[0], database=None) == Config(policy="all", strict=True, time_limit="3s")
    monkeypatch.setenv("MUCUDNN_STRICT", "maybe")
    assert CliRunner().invoke(command).exit_code != 0
