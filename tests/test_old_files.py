"""Files of version 0.1.0 are still read: models, pickled values, measurements, profiles, and the keys of results."""

from __future__ import annotations

import copy
import csv
import gzip
import io
import json
import pickle
import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import invoke
from support.places import DATA
from torch import Tensor, nn

import mucudnn
from mucudnn.database.migrations import SINCE_VERSION_1, VERSION
from mucudnn.words.results import METHOD

FOLDER = DATA / "version-0.1.0"
COMMANDS = json.loads((FOLDER / "commands.json").read_text())
FORWARD = mucudnn.ConvProblem(mucudnn.Operation.FORWARD, 8, 32, 32, 16, 3, 3, padding=(1, 1))
FILTER = FORWARD.with_operation(mucudnn.Operation.BACKWARD_FILTER)


def stored(name: str) -> bytes:
    return gzip.decompress((FOLDER / f"{name}.gz").read_bytes())


def unpickled(name: str) -> Any:
    return pickle.loads(stored(f"{name}.pickle"))


# Optimized models, saved whole


@pytest.fixture(params=["kept", "budget", "headroom"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    return loaded(request.param)


def loaded(name: str) -> nn.Module:
    model = torch.load(io.BytesIO(stored(f"model-{name}.pt")), weights_only=False)
    assert isinstance(model, nn.Module)
    return model


def with_torchs_convolutions(model: nn.Module) -> nn.Module:
    """A copy with the same weights, that runs nothing of ours."""
    torchs = copy.deepcopy(model)
    for module in torchs.modules():
        if type(module) is mucudnn.Conv2d:
            module.__class__ = nn.Conv2d  # type: ignore[assignment]
    return torchs


def convolutions(model: nn.Module) -> list[mucudnn.Conv2d]:
    return [module for module in model.modules() if isinstance(module, mucudnn.Conv2d)]


def images() -> Tensor:
    return torch.randn(4, 8, 32, 32)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))


def test_models_compute_what_torch_does(model: nn.Module) -> None:
    torchs, x = with_torchs_convolutions(model), images()
    with torch.no_grad():
        torch.testing.assert_close(model(x), torchs(x), rtol=1e-4, atol=1e-4)
    model.train()
    torch.testing.assert_close(gradients(model, x), gradients(torchs, x), rtol=1e-4, atol=1e-4)


def test_models_run_what_was_chosen(model: nn.Module) -> None:
    gradients(model.train(), images())
    chosen = [module.choices for module in convolutions(model) if module.choices is not None]
    ran = {recipe.problem.operation for choices in chosen for recipe in choices.recipes.values() if recipe is not None}
    assert ran == {
        tuned.problem.operation
        for _, tuned in mucudnn.report(model).layers
        if not tuned.configuration.is_baseline and tuned.batch_size == 4
    }
    assert ran


def test_reports_of_models_are_printed(model: nn.Module) -> None:
    report = mucudnn.report(model)
    assert {name for name, _ in report.layers} == {"0", "2"}
    assert "winograd-4x4" in str(report)
    assert any("winograd-4x4" in tuned.configuration.algorithms for _, tuned in report.layers)


def test_models_keep_their_filters() -> None:
    model, x = loaded("kept"), images()
    with torch.no_grad():
        torch.testing.assert_close(model(x), with_torchs_convolutions(model)(x), rtol=1e-4, atol=1e-4)
    kept = [module.filter_cache for module in convolutions(model) if module.filter_cache is not None]
    assert len(kept) == len(mucudnn.report(model).kept) > 0
    if mucudnn.tune([], 1).environment.compiled != "torch":  # else nothing can tell whether a filter has changed
        assert all(one.bytes_in_use for one in kept)


def test_models_are_optimized_and_saved_again(model: nn.Module) -> None:
    x, stream = images(), io.BytesIO()
    mucudnn.optimize(model, x, mucudnn.Config(algorithms=("gemm",), operations=(mucudnn.Operation.FORWARD,)))
    torch.save(model, stream)
    stream.seek(0)
    with torch.no_grad():
        torch.testing.assert_close(torch.load(stream, weights_only=False)(x), model(x))


# Pickled values


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (
            "config",
            mucudnn.Config(
                workspace_limit="8MiB",
                cache_budget=4096,
                policy="all",
                operations=(mucudnn.Operation.FORWARD,),
                database="some.sqlite",
            ),
        ),
        (
            "problem",
            mucudnn.ConvProblem(
                *(mucudnn.Operation.BACKWARD_DATA, 8, 9, 10, 16, 3, 5, (1, 2), (1, 0), (2, 1), 2, "bfloat16"),
                mucudnn.MemoryFormat.CHANNELS_LAST,
            ),
        ),
        (
            "configuration",
            mucudnn.Configuration((mucudnn.MicroConfig("gemm", 3), mucudnn.MicroConfig("native", 1)), 0.5, 4096),
        ),
    ],
)
def test_values_are_equal_to_those_made_now(name: str, value: object) -> None:
    assert unpickled(name) == value
    assert hash(unpickled(name)) == hash(value)


@pytest.mark.parametrize("name", ["tuning-limit", "tuning-budget"])
def test_tunings(name: str) -> None:
    tuning = unpickled(name)
    assert type(tuning) is mucudnn.Tuning
    assert [tuned.problem for tuned in tuning.problems] == [FORWARD, FILTER]
    assert all(str(tuned.configuration) in str(tuning) for tuned in tuning.problems)
    assert tuning[FORWARD].configuration.batch_size == max(tuning.configurations(FORWARD)) == 4
    assert list(tuning.to_frame()["k"]) == [16, 16]
    assert len(json.loads(json.dumps(tuning.to_json()))["problems"]) == 2
    assert (tuning.divided is not None) == (name == "tuning-budget")
    assert pickle.loads(pickle.dumps(tuning)) == tuning


def test_reports() -> None:
    report, of_model = unpickled("report"), mucudnn.report(loaded("kept"))
    assert type(report) is type(of_model)
    assert str(report) == str(of_model)
    assert report == of_model


def test_errors() -> None:
    errors = unpickled("errors")
    assert [str(error) for error in errors] == [f"{type(error).__name__} of 0.1.0" for error in errors]
    assert all(isinstance(error, mucudnn.MucudnnError) for error in errors)
    public = ["MucudnnError", "InvalidInputError", "InfeasibleError", "DatabaseError", "UnavailableError"]
    assert {type(error) for error in errors} >= {getattr(mucudnn, name) for name in public}
    (infeasible,) = (error for error in errors if isinstance(error, mucudnn.InfeasibleError))
    assert infeasible.smallest_feasible_bytes == 1234


@pytest.mark.parametrize("name", ["Residual", "Branches"])
def test_modules_of_the_networks(name: str) -> None:
    """Those that saved networks have, beside torch's; a pickle names them so."""
    module = pickle.loads(f"cmucudnn.bench.networks\n{name}\n.".encode())
    assert issubclass(module, nn.Module)


# Measurements


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the old files, where commands are run; the database is the one that they use."""
    monkeypatch.chdir(tmp_path)
    for name in ("layers.csv", "measurements.csv", "measurements.jsonl"):
        Path(name).write_bytes(stored(name))
    with closing(sqlite3.connect("measurements.sqlite")) as connection:
        connection.executescript(stored("measurements.sql").decode())
    monkeypatch.setenv("MUCUDNN_DATABASE", "measurements.sqlite")
    return tmp_path


@pytest.fixture
def of_this_machine(there: Path) -> Path:
    """The same, as if it had been measured here."""
    here = asdict(mucudnn.tune([], 1).environment)
    columns = ", ".join(f"{name} = ?" for name in here)
    with closing(sqlite3.connect("measurements.sqlite")) as connection, connection:
        connection.execute(f"UPDATE environments SET {columns}", list(here.values()))
    return there


def run(*arguments: object) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def rows() -> list[str]:
    run("database", "export", "now.csv")
    return Path("now.csv").read_text().splitlines()


@pytest.mark.usefixtures("there")
def test_databases_are_described() -> None:
    kinds = Counter(json.loads(line)["kind"] for line in stored("measurements.jsonl").splitlines())
    assert set(kinds) == {"measurement", "verification", "failure"}
    described = run("database", "info").split()
    assert all(str(count) in described for count in kinds.values())


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("name", ["measurements.csv", "measurements.jsonl"])
def test_databases_are_exported_as_they_were(name: str) -> None:
    run("database", "export", f"now-{name}")
    assert rows_in(Path(f"now-{name}").read_bytes()) == as_exported_now(name)


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("name", ["measurements.sqlite", "measurements.csv", "measurements.jsonl"])
def test_what_was_exported_is_merged(name: str) -> None:
    run("database", "merge", name, "--database", "merged.sqlite")
    run("database", "export", "merged.csv", "--database", "merged.sqlite")
    assert rows_in(Path("merged.csv").read_bytes()) == as_exported_now("measurements.csv")


def rows_in(exported: bytes) -> list[dict[str, Any]]:
    text = exported.decode()
    if text.startswith("{"):
        return [json.loads(line) for line in text.splitlines()]
    return [*csv.DictReader(io.StringIO(text, newline=""))]


def as_exported_now(name: str) -> list[dict[str, Any]]:
    """The old rows; those of later versions say so, and have what the operator costs in whole runs of ours.

    Their load is unknown: an empty cell of a table, and nothing in JSON. They were measured in the first way.
    """
    rows = rows_in(stored(name))
    for row in rows:
        if name.endswith(".csv"):
            row |= dict.fromkeys(SINCE_VERSION_1, "")
        number = type(row["threads"])
        row |= {"method": number(1), "schema": number(VERSION)}
        if row["kind"] == "verification" and not is_torchs_own(row) and '"instead"' not in row["configuration"]:
            row["time_s"] = type(row["time_s"])(float(row["time_s"]) + 30e-6)
    return rows


def is_torchs_own(row: dict[str, Any]) -> bool:
    ((algorithm, _, _, count, *_), *more) = json.loads(row["configuration"])
    return (algorithm, count) == ("native", 1) and not more


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("name", ["measurements.sqlite", "measurements.csv", "measurements.jsonl"])
def test_what_is_chosen_from_them_is_what_was(name: str) -> None:
    _, *arguments = COMMANDS["solve"][1:]
    run("solve", name, *arguments, "--json", "now.json")
    assert configurations(Path("now.json").read_bytes()) == configurations(stored("solve.json"))


def configurations(results: bytes) -> list[Any]:
    return [problem["configuration"] for problem in json.loads(results)["problems"]]


@pytest.mark.usefixtures("of_this_machine")
@pytest.mark.parametrize("name", ["tuning-limit", "tuning-budget"])
def test_a_tuning_measures_again_what_was_measured_in_another_way_and_loses_nothing(name: str) -> None:
    old, before = unpickled(name), rows()
    tuning = mucudnn.tune([FORWARD, FILTER], 4, old.config)
    assert {measured.method for tuned in tuning.problems for measured in tuned.measurements} == {METHOD}
    assert set(rows()) > set(before)


# Results


NEW_KEYS = {"machine_limits", "over_bound", "second_looks"}  # of bench network


def keys(value: Any, path: str = "") -> dict[str, set[str]]:
    """Path of each object -> its keys: ``problems[].problem`` -> operation, c, h and so on."""
    if isinstance(value, list):
        return merged(keys(inner, f"{path}[]") for inner in value)
    if isinstance(value, dict):
        return merged([{path: set(value)}, *(keys(inner, f"{path}.{name}") for name, inner in value.items())])
    return {}


def merged(parts: Iterable[dict[str, set[str]]]) -> dict[str, set[str]]:
    every: dict[str, set[str]] = {}
    for part in parts:
        for path, names in part.items():
            every.setdefault(path, set()).update(names)
    return every


def heading(table: bytes) -> bytes:
    return table.splitlines()[0]


@pytest.mark.usefixtures("of_this_machine")
@pytest.mark.parametrize(("name", "arguments"), COMMANDS.items())
def test_results_have_the_same_keys(name: str, arguments: Sequence[str]) -> None:
    """In all objects that are in both; some lists are empty, as measurements have it. New keys may join them."""
    run(*arguments, "--json", f"{name}.json")
    now, before = keys(json.loads(Path(f"{name}.json").read_bytes())), keys(json.loads(stored(f"{name}.json")))
    common = now.keys() & before.keys()
    assert len(common) > 2
    assert {path: now[path] - NEW_KEYS for path in common} == {path: before[path] for path in common}
    for table in Path().glob("bench-*.csv"):
        assert heading(table.read_bytes()) == heading(stored(table.name))
