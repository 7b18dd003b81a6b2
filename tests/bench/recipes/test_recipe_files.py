"""Recipe files: what is read, which result folders they mean, and what is said of a faulty one."""

from __future__ import annotations

from pathlib import Path

import pytest

from mucudnn.bench.folders.speedups import Estimate
from mucudnn.bench.recipes.criteria import Criterion
from mucudnn.bench.recipes.judging import Judgement
from mucudnn.bench.recipes.recipe_file import DEVICES, find_recipe, read_recipe, shipped_recipes
from mucudnn.words.config import BatchSizePolicy
from mucudnn.words.errors import InvalidInputError

HEAD = 'title = "a title"\n'
FIXED = '[fixed]\nnetworks = ["alexnet"]\n'
MUTABLE = '[mutable]\nworkspace_limit = ["8MiB", "none"]\npolicy = ["all"]\n'
ACCEPT = "[accept]\nspeedup = { at_least = 1.0 }\n"


def written(folder: Path, *parts: str) -> Path:
    path = folder / "mine.toml"
    path.write_text("".join(parts))
    return path


def test_shipped_recipes_can_be_read() -> None:
    for device in DEVICES:
        for name in shipped_recipes():
            recipe = read_recipe(find_recipe(name), device)
            assert recipe.cells()
            assert recipe.criteria
            assert recipe.title != name
            assert recipe.published


def test_alternatives_of_the_grid_share_a_folder_and_others_have_their_own(tmp_path: Path) -> None:
    more = 'batch = [4, 8]\nalgorithms = [["gemm"], ["gemm", "direct"]]\n'
    path = written(tmp_path, '[fixed]\nnetworks = ["alexnet", "a/b.csv"]\n', MUTABLE, more, ACCEPT)
    cells = read_recipe(path).cells()
    assert [cell.name for cell in cells][:4] == [
        "alexnet-batch-4-algorithms-gemm",
        "alexnet-batch-4-algorithms-gemm-direct",
        "alexnet-batch-8-algorithms-gemm",
        "alexnet-batch-8-algorithms-gemm-direct",
    ]
    assert [cell.source for cell in cells] == 4 * ["alexnet"] + 4 * ["a/b.csv"]
    assert cells[4].name == "a-b.csv-batch-4-algorithms-gemm"
    assert cells[1].settings == {
        "batch": 4,
        "algorithms": ("gemm", "direct"),
        "policy": (BatchSizePolicy.ALL,),
        "workspace_limit": (8 * 2**20, None),
    }


def test_the_section_of_the_device_replaces_key_by_key(tmp_path: Path) -> None:
    own = "[cpu.fixed]\nbatch = 2\n[cpu.mutable]\nrounds = [3, 4]\n[cpu.accept]\nspeedup = { at_least = 0.5 }\n"
    path = written(tmp_path, FIXED, "batch = 256\nrounds = 15\n", MUTABLE, ACCEPT, "error = { at_most = 1 }\n", own)
    on_cpu, on_cuda = (read_recipe(path, device) for device in DEVICES)
    assert (on_cpu.settings["batch"], on_cpu.settings["rounds"]) == ((2,), (3, 4))
    assert (on_cuda.settings["batch"], on_cuda.settings["rounds"]) == ((256,), (15,))
    assert [one.at_least for one in on_cpu.criteria] == [0.5, None]
    assert [one.at_least for one in on_cuda.criteria] == [1.0, None]


def test_a_fault_is_told_with_its_place_and_what_is_allowed(tmp_path: Path) -> None:
    for parts, said in (
        (("[fixed\n",), "not a TOML file: "),
        ((HEAD, 'benchmark = "x"\n', FIXED), "line 2: benchmark is 'x'; allowed are convolutions, program"),
        (("fixed = 1\n",), "line 1: fixed is 1; it must be a section, [fixed]"),
        ((FIXED, "bach = 3\n"), "line 3: [fixed] bach is not known; did you mean batch? allowed are networks, "),
        ((FIXED, "batch = 0\n"), "line 3: [fixed] batch is 0; it must be at least 1"),
        ((FIXED, 'policy = "most"\n'), "line 3: [fixed] policy is 'most'; allowed are undivided, power-of-two, all"),
        ((FIXED, "filters = [3, 3]\n[mutable]\nbatch = 4\n"), "line 5: [mutable] batch is 4; it must be a list of"),
        ((FIXED, 'operations = ["up"]\n'), "line 3: [fixed] operations one of operations is 'up'; allowed are forward"),
        ((FIXED, "batch = 1\n[mutable]\nbatch = [2]\n"), "line 3: [fixed] batch is in [mutable], too"),
        (('[mutable]\nworkspace_limit = ["8"]\n',), "line 2: [mutable] workspace_limit size '8' has no unit"),
        (('[mutable]\nworkspace_budget = ["none"]\n',), "workspace_budget is 'none'; it must be a size"),
        ((MUTABLE, ACCEPT), "fixed needs networks, a list, or table, one name: none is given"),
        ((FIXED, 'table = "t"\n', ACCEPT), "line 1: fixed needs networks, a list, or table, one name: both are"),
        (('benchmark = "program"\n', FIXED, ACCEPT), "mutable needs workspace_budget, without which"),
        ((FIXED, MUTABLE), "accept has no criterion; add a section [accept] with some of speedup, "),
        (
            (FIXED, "[accept]\nloss_difference = { at_most = 1 }\n"),
            "line 4: [accept] loss_difference is not known; allowed are speedup, error, workspace, share_of_limit",
        ),
        ((FIXED, "[accept]\nerror = 3\n"), "line 4: [accept] error is 3; write error = { at_most = ... }"),
        ((FIXED, "[accept]\nerror = { most = 3 }\n"), "line 4: [accept] error has the unknown key 'most'"),
        ((FIXED, "[accept]\nerror = { }\n"), "line 4: [accept] error must have one bound: at_least or at_most"),
        ((FIXED, '[accept]\nworkspace = { at_most = "none" }\n'), "workspace at_most is 'none'; it must be a size"),
        ((FIXED, '[accept]\ntime = { at_most = "3 days" }\n'), "line 4: [accept] time"),
        ((FIXED, '[accept]\nerror = { at_most = 1, of = "me" }\n'), "error of is 'me'; allowed are torch, "),
        (
            (FIXED, MUTABLE, '[accept]\nerror = { at_most = 1, policy = "undivided" }\n'),
            "line 7: [accept] error policy is 'undivided'; allowed are all",
        ),
        (
            (FIXED, MUTABLE, '[accept]\nerror = { at_most = 1, workspace_limit = "1MiB" }\n'),
            "error workspace_limit is '1MiB', which is not part of the grid: it has 8 MiB, no limit",
        ),
    ):
        path = written(tmp_path, *parts)
        with pytest.raises(InvalidInputError) as raised:
            read_recipe(path)
        assert str(raised.value).startswith(str(path))
        assert said in str(raised.value)


def test_bounds_and_what_was_found_are_told_with_digits_enough() -> None:
    for measure, bound, value, told, found in (
        ("speedup", 0.0001, 1.0, "0.0001×", "1×"),
        ("speedup", 1.0, 0.99999, "1×", "0.99999×"),
        ("error", 1e-5, 1.00004e-5, "1e-05", "1.00004e-05"),
        ("workspace", 64 * 2**20, 64 * 2**20 - 1, "64 MiB", "67108863B (64 MiB)"),
        ("time", 0.02, 0.0200001, "20 ms", "20.0001 ms"),
    ):
        criterion = Criterion(measure, "mucudnn", at_least=bound)
        assert str(criterion) == f"{measure} of mucudnn at least {told}"
        assert str(Judgement(criterion, Estimate(value), "here")) == f"{found} (here)"
    interval = Judgement(Criterion("speedup", "mucudnn", at_least=1.0), Estimate(0.95, 0.9, 0.997), "here")
    assert str(interval) == "0.95×, 0.9× to 0.997× (here)"
