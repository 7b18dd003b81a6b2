"""Files that version 0.1.0 made: see README.txt. It runs in a checkout of that version, and takes half a minute."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from mucudnn.configuration import Failure
from torch import nn

import mucudnn
from mucudnn import errors
from mucudnn.database.database import Database

HERE = Path(__file__).resolve().parent
DATABASE = "measurements.sqlite"
ALGORITHMS = ("gemm", "direct", "winograd-4x4", "winograd-4x4-5x5")  # the last is not for 3x3: a failure
LAYERS = """name,c,h,w,k,r,s,pad_h,pad_w,stride_h,stride_w
0,8,32,32,16,3,3,1,1,1,1
2,16,32,32,16,3,3,1,1,1,1
"""  # those of ``network``


def network() -> nn.Sequential:
    convolutions = nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1, bias=False)
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 3))


def optimized(**limits: int | str | None) -> nn.Sequential:
    """What it chose depends on the machine."""
    torch.manual_seed(20181001)
    model, x = network().eval(), torch.randn(4, 8, 32, 32)
    mucudnn.optimize(model, x, mucudnn.Config(algorithms=ALGORITHMS, database=DATABASE, **limits))  # type: ignore[arg-type]
    assert not all(tuned.configuration.is_baseline for _, tuned in mucudnn.report(model).layers)
    return model


def models() -> Iterator[tuple[str, nn.Sequential]]:
    kept = optimized(cache_budget="1MiB")
    assert mucudnn.report(kept).kept, "nothing was worth keeping: run it again on a quiet machine"
    yield "kept", kept
    yield "budget", optimized(workspace_budget="2MiB")
    yield "headroom", optimized(workspace_limit="headroom")


def raised() -> list[errors.MucudnnError]:
    """One of each kind."""
    kinds = (
        *(errors.MucudnnError, errors.InvalidInputError, errors.DatabaseError),
        *(errors.OutputError, errors.UnavailableError, errors.BrokenDeviceError),
    )
    infeasible = errors.InfeasibleError("InfeasibleError of 0.1.0", smallest_feasible_bytes=1234)
    return [infeasible, *(kind(f"{kind.__name__} of 0.1.0") for kind in kinds)]


def values() -> Iterator[tuple[str, object]]:
    """What users can have pickled, tunings and reports of them first."""
    forward = mucudnn.ConvProblem(mucudnn.Operation.FORWARD, 8, 32, 32, 16, 3, 3, padding=(1, 1))
    problems = [forward, forward.with_operation(mucudnn.Operation.BACKWARD_FILTER)]
    for name, limits in {"limit": {}, "budget": {"workspace_budget": "2MiB"}}.items():
        config = mucudnn.Config(algorithms=ALGORITHMS, database=DATABASE, **limits)  # type: ignore[arg-type]
        yield f"tuning-{name}", mucudnn.tune(problems, 4, config)
    yield "report", mucudnn.report(torch.load("model-kept.pt", weights_only=False))
    yield (
        "config",
        mucudnn.Config(
            workspace_limit="8MiB",
            cache_budget=4096,
            policy="all",
            operations=(mucudnn.Operation.FORWARD,),
            database="some.sqlite",
        ),
    )
    yield (
        "problem",
        mucudnn.ConvProblem(
            *(mucudnn.Operation.BACKWARD_DATA, 8, 9, 10, 16, 3, 5, (1, 2), (1, 0), (2, 1), 2, "bfloat16"),
            mucudnn.MemoryFormat.CHANNELS_LAST,
        ),
    )
    yield (
        "configuration",
        mucudnn.Configuration((mucudnn.MicroConfig("gemm", 3), mucudnn.MicroConfig("native", 1)), 0.5, 4096),
    )
    yield "errors", raised()


def command(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "mucudnn", *arguments], check=True, stdout=subprocess.DEVNULL)


def add_failure() -> None:
    """Made up: here nothing fails that is supported."""
    tuning = pickle.loads(Path("tuning-limit.pickle").read_bytes())
    failure = Failure(mucudnn.MicroConfig("fft", 4), "made up")
    with Database(DATABASE) as database:
        database.add_failure(tuning.environment, tuning.problems[0].problem, 2, failure)


def export() -> None:
    for name in ("measurements.csv", "measurements.jsonl"):
        command("database", "export", name)
    with closing(sqlite3.connect(DATABASE)) as connection, Path("measurements.sql").open("w") as stream:
        for pragma in ("application_id", "user_version"):
            (value,) = connection.execute(f"PRAGMA {pragma}").fetchone()
            stream.write(f"PRAGMA {pragma} = {value};\n")
        stream.writelines(f"{statement}\n" for statement in connection.iterdump())


def results() -> None:
    Path("layers.csv").write_text(LAYERS)
    for name, arguments in json.loads((HERE / "commands.json").read_text()).items():
        command(*arguments, "--json", f"{name}.json")


def keep(path: Path) -> None:
    """Beside this file, compressed without name and time."""
    (HERE / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))


def main() -> None:
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        os.chdir(folder)  # so that no path of this machine is in the files
        os.environ["MUCUDNN_DATABASE"] = DATABASE
        for name, model in models():
            torch.save(model, f"model-{name}.pt")
        for name, value in values():
            Path(f"{name}.pickle").write_bytes(pickle.dumps(value))
        results()
        add_failure()
        export()
        for path in Path().iterdir():
            if path.name != DATABASE:
                keep(path)
        os.chdir(HERE)


if __name__ == "__main__":
    main()
