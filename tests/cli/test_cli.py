"""The commands through their real entry point: what they print and write."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from support.command_line import TUNE, commands, invoke, one_layer
from support.database_rows import FAST, HERE, PROBLEM, fill
from support.places import TESTS

from mucudnn.bench.sources import table_tuning
from mucudnn.bench.sources.layers import LayerTable, load_source
from mucudnn.cli import doctor
from mucudnn.database.database import Database
from mucudnn.kernels.registry import algorithm_versions, algorithms
from mucudnn.words.problem import MemoryFormat, Operation
from mucudnn.words.results import MicroConfig


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
    seen: dict[str, object] = {}

    def stop(table: object, config: object, **rest: object) -> None:
        seen.update(table=table, config=config, **rest)
        raise KeyboardInterrupt

    monkeypatch.setattr(table_tuning, "tune_table", stop)
    invoke(
        *("tune", layers, "--batch", "6", "--workspace-limit", "1.5MiB", "--policy", "all", "--operations", "forward"),
        *("--memory-format", "channels-last", "--dtype", "bfloat16", "--algorithms", "gemm,fft", "--deterministic"),
        "--strict",
        *(
            "--max-relative-error",
            "0.5",
            "--threads",
            "1",
            "--time-limit",
            "2min",
            "--database",
            tmp_path / "my.sqlite",
        ),
    )
    config, (layer,) = seen["config"], seen["table"].layers  # type: ignore[attr-defined]
    assert (layer.batch_size, layer.problem.dtype, layer.problem.memory_format) == (
        6,
        "bfloat16",
        MemoryFormat.CHANNELS_LAST,
    )
    assert config.workspace_limit_bytes == 3 << 19  # type: ignore[attr-defined]
    assert (config.policy, config.operations) == ("all", (Operation.FORWARD,))  # type: ignore[attr-defined]
    assert config.algorithms == ("gemm", "fft")  # type: ignore[attr-defined]
    assert config.deterministic  # type: ignore[attr-defined]
    assert config.strict  # type: ignore[attr-defined]
    assert (config.max_relative_error, config.time_limit_s) == (0.5, 120)  # type: ignore[attr-defined]
    assert config.database == tmp_path / "my.sqlite"  # type: ignore[attr-defined]


def test_doctor_says_what_is_missing_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    result = invoke("doctor")
    assert result.exit_code == 0, result.output
    for expected in ("CPU", "threads", "oneDNN", "cuDNN", "pip install 'mucudnn[cuda]'", "native", "gemm", "fft"):
        assert expected in result.output


def test_prune_leaves_what_the_gpu_of_this_machine_gave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, path = replace(HERE, device="NVIDIA H200", numerics="tf32"), fill(tmp_path / "rows.sqlite")
    engine, torchs_search = (replace(FAST, micro_config=MicroConfig(n, 8)) for n in ("cudnn:67", "native-benchmark-10"))
    with Database(path) as opened:
        opened.add(gpu, PROBLEM, 91900, engine)
        opened.add(gpu, PROBLEM, 1, torchs_search)
        opened.add(replace(gpu, numerics="no-tf32"), PROBLEM, 91900, engine)
    monkeypatch.setattr("mucudnn.running.environment.current_environment", {"cpu": HERE, "cuda": gpu}.__getitem__)
    result = invoke("database", "prune", "--other-environments", "--other-versions", "--database", path)
    assert result.output == "2 rows removed\n"  # an old failure of fft, and what was measured without TF32
    with Database(path) as opened:
        assert opened.measurements(gpu, PROBLEM, {"cudnn:67": 91900, "native-benchmark-10": 1}) == (
            engine,
            torchs_search,
        )


def test_an_algorithm_has_one_version_on_all_devices() -> None:
    """What prunes rows asks for the version of a name."""
    every = {(a.name, a.version) for device in ("cpu", "cuda") for a in algorithms(device)}
    assert dict(every) == algorithm_versions()
    assert len(every) == len(algorithm_versions())


def test_warnings_are_one_line_without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def warn(*args: object, **kwargs: object) -> LayerTable:
        warnings.simplefilter("always")
        warnings.warn("look out", stacklevel=1)
        return load_source("alexnet", batch=1)

    monkeypatch.setattr("mucudnn.bench.sources.layers.load_source", warn)
    assert invoke("layers", "alexnet").stderr == "Warning: look out\n"


@pytest.mark.parametrize("command", [[], ["report"], ["bench", "deepbench"]])
def test_help_loads_nothing_heavy(command: list[str]) -> None:
    code = (
        f"import sys\ntry:\n    from mucudnn.cli.main import main; main({[*command, '--help']})\nfinally:\n"
        "    print([name for name in ('torch', 'rich', 'pandas', 'numpy') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "[]"
    assert " ".join(["Usage: -c", *command]) in output


def test_the_documentation_names_every_command_and_only_options_that_exist() -> None:
    text = (TESTS.parent / "docs" / "commands.md").read_text()
    examples = re.findall(r"^\| `[^`]*?(mucudnn [^`]*)`", text, re.MULTILINE)
    every = dict(commands())
    named = {example: max((n for n in every if f"{example} ".startswith(f"{n} ")), key=len) for example in examples}
    undocumented = {name for name in every if name not in named.values() and f"`{name.split()[-1]}`" not in text}
    assert undocumented - {"mucudnn recipe list", "mucudnn recipe show"} == set()
    for example, name in named.items():
        known = {option for param in every[name].params for option in (*param.opts, *param.secondary_opts)}
        assert set(re.findall(r"(?<= )--[a-z-]+", example)) <= known, example
