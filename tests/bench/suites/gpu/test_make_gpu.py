"""What ``make gpu`` does with its parts: limits of time, failures, the summary and the archive; with made-up parts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
from click.testing import CliRunner
from conftest import why_no_gpu

from mucudnn.bench.recipes.shipped_recipes import shipped_recipes
from mucudnn.bench.suites.gpu import device_record, engine_differences, record_engines
from mucudnn.bench.suites.gpu import parts as suite_parts
from mucudnn.bench.suites.gpu import suite as gpu_suite
from mucudnn.bench.suites.gpu.parts import SuitePart, parts
from mucudnn.bench.suites.gpu.suite import PartStatus, Suite, folder_of, main
from mucudnn.bench.suites.overhead import divided as divided_overhead
from mucudnn.cli.main import main as mucudnn_command
from mucudnn.words.errors import UnavailableError

DEVICE = {"environment": {"device": "NVIDIA H200"}, "versions": {"torch": "2.11.0"}}
JOB = """
import json, os, pathlib, signal, subprocess, sys, time

what, *given = sys.argv[1:]
if what == "say":
    print(*given)
elif what == "fail":
    sys.exit("no such engine")
elif what == "summary":  # as it is while this part runs
    print((pathlib.Path(given[0]) / "summary.json").read_text())
elif what == "interrupted":
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        print("wrote what there was")
        sys.exit(130)
elif what == "stubborn":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print(child.pid, flush=True)
    time.sleep(60)
elif what == "database":
    print(os.environ["MUCUDNN_DATABASE"])
"""


@pytest.fixture(autouse=True)
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that the parts run."""
    (tmp_path / "suite_job.py").write_text(JOB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu_suite, "_GRACE_S", 0.5)
    monkeypatch.setattr(gpu_suite, "_RESERVE_S", 0.5)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    return folder


def part(name: str, *arguments: str, share: float = 0.5) -> SuitePart:
    return SuitePart(name, ("suite_job", *arguments), share)


def summary(out: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return read


def run(out: Path, *wanted: SuitePart, seconds: float = 30.0, archive: Path | None = None) -> dict[str, dict[str, Any]]:
    Suite(DEVICE, out, archive, wanted).run(time.monotonic() + seconds)
    return {outcome["name"]: outcome for outcome in summary(out)["parts"]}


def test_a_part_that_fails_does_not_stop_the_others(out: Path) -> None:
    outcomes = run(out, part("first", "fail"), part("second", "say", "hello"))
    assert (outcomes["first"]["status"], outcomes["first"]["exit_code"]) == ("failed", 1)
    assert outcomes["first"]["tail"] == "no such engine"
    assert (outcomes["second"]["status"], outcomes["second"]["exit_code"]) == ("passed", 0)
    assert (out / "second.log").read_text() == "hello\n"
    assert summary(out)["versions"] == DEVICE["versions"]


def test_the_answer_is_whether_all_passed(out: Path) -> None:
    for wanted, expected in (([part("a", "say")], True), ([part("a", "say"), part("b", "fail")], False)):
        assert Suite(DEVICE, out, None, wanted).run(time.monotonic() + 30) is expected


def test_placeholders_are_filled_in(out: Path) -> None:
    outcomes = run(out, part("first", "say", "{out}", "{seconds}", share=0.1), seconds=101.0)
    folder, seconds = outcomes["first"]["tail"].split()
    assert folder == str(out)
    assert int(seconds) == 8  # a tenth of a hundred seconds, of which some are kept in reserve
    assert outcomes["first"]["command"].endswith(f"-m suite_job say {out} {seconds}")


def test_measurements_are_kept_in_the_folder(out: Path) -> None:
    assert run(out, part("first", "database"))["first"]["tail"] == str(out / "measurements.sqlite")


def test_the_summary_tells_what_is_running_and_what_is_done(out: Path) -> None:
    outcomes = run(out, part("first", "say"), part("second", "summary", str(out)), part("third", "say"))
    seen = json.loads((out / "second.log").read_text())["parts"]
    assert [outcome["status"] for outcome in seen] == ["passed", "running", "not begun"]
    assert {outcome["status"] for outcome in outcomes.values()} == {"passed"}


def test_a_part_out_of_time_is_asked_to_end(out: Path) -> None:
    outcomes = run(out, part("first", "interrupted"), part("second", "say"), seconds=6.0)
    assert outcomes["first"]["status"] == PartStatus.STOPPED
    assert (outcomes["first"]["exit_code"], outcomes["first"]["tail"]) == (130, "wrote what there was")
    assert outcomes["second"]["status"] == PartStatus.PASSED


def test_a_part_that_does_not_end_is_killed_with_its_children(out: Path) -> None:
    outcomes = run(out, part("first", "stubborn"), seconds=6.0)
    assert outcomes["first"]["status"] == PartStatus.STOPPED
    assert outcomes["first"]["exit_code"] < 0
    child, end_s = int(outcomes["first"]["tail"]), time.monotonic() + 5
    while is_running(child) and time.monotonic() < end_s:  # a signal takes a moment
        time.sleep(0.01)
    assert not is_running(child)


def is_running(pid: int) -> bool:
    """Zombies, which nobody has waited for, do not run."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def test_what_the_time_does_not_suffice_for_is_told(out: Path) -> None:
    begun = time.monotonic()
    outcomes = run(out, part("first", "interrupted", share=1.0), part("second", "say"), seconds=4.0)
    assert outcomes["second"]["status"] == PartStatus.LEFT_OUT
    assert outcomes["second"]["seconds"] is None
    assert time.monotonic() - begun < 4.0


def test_the_archive_has_the_folder_after_each_part(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "all.tar.gz"
    kept, run_part = list[set[str]](), Suite._run

    def looked_at(self: Suite, part: SuitePart, limit_s: float) -> None:
        run_part(self, part, limit_s)
        with tarfile.open(archive) as packed:
            kept.append({name.removeprefix("results").removeprefix("/") for name in packed.getnames()})

    monkeypatch.setattr(Suite, "_run", looked_at)
    run(out, part("first", "say"), part("second", "say"), archive=archive)
    assert kept == [{"", "summary.json", "first.log"}, {"", "summary.json", "first.log", "second.log"}]


# The command


def test_the_folder_is_that_of_the_device() -> None:
    assert folder_of(DEVICE).parts[-3:] == ("bench", "results", "nvidia-h200")


@pytest.mark.parametrize(
    ("file", "root"),
    [
        ("checkout/bench/suites/gpu/parts.py", "checkout"),
        ("sdist/mucudnn/bench/suites/gpu/parts.py", "sdist"),
        ("checkout/.venv/lib/python3.11/site-packages/mucudnn/bench/suites/gpu/parts.py", None),
    ],
)
def test_the_tests_are_those_of_the_checkout_or_the_sdist(file: str, root: str | None, tmp_path: Path) -> None:
    for folder in ("checkout", "sdist"):
        (tmp_path / folder / "tests" / "gpu").mkdir(parents=True)
    assert suite_parts.find_root(tmp_path / file) == (None if root is None else tmp_path / root)


def test_from_a_wheel_it_says_that_there_are_no_tests_and_runs_the_benchmarks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(suite_parts, "ROOT", None)
    monkeypatch.setattr(gpu_suite, "record_device", lambda device: DEVICE)
    monkeypatch.setattr(Suite, "_run", lambda suite, part, limit_s: suite._note(part, status=PartStatus.PASSED))
    result = CliRunner().invoke(main, ["--device", "cpu"])
    assert "the tests of a GPU are in its checkout and its sdist: only the benchmarks run" in result.output
    outcomes = summary(tmp_path / "mucudnn-results" / "nvidia-h200")["parts"]
    assert [outcome["name"] for outcome in outcomes] == ["overhead", "network-alexnet", "training-alexnet"]
    assert result.exit_code == 0


@pytest.mark.skipif(why_no_gpu() is None, reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH")
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 1
    assert "Error: device is 'cuda', but torch" in result.output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--only", "nothing"), "'nothing' begins the name of no part; there are test_gpu, test_gpu_models, "),
        (("--out", "here", "--archive", "here/all.tar.gz"), "which it packs: name another place"),
        (("--minutes", "0"), "0.0 is not in the range x>0"),
    ],
)
def test_bad_values(arguments: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_suite, "record_device", lambda device: DEVICE)
    result = CliRunner().invoke(main, ["--device", "cpu", *arguments])
    assert result.exit_code == 2
    assert expected in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("option", ["--out", "--archive"])
def test_a_place_that_cannot_be_written_is_told_before_anything_runs(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_suite, "record_device", lambda device: DEVICE)
    monkeypatch.setattr(Suite, "_run", None)
    (tmp_path / "file").write_text("no folder")
    places = {"--out": tmp_path / "out"} | {option: tmp_path / "file" / "in" / "all.tar.gz"}
    result = CliRunner().invoke(main, ["--device", "cpu", *(str(part) for pair in places.items() for part in pair)])
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    assert "file/in" in result.output
    assert "Not a directory" in result.output


@pytest.mark.parametrize(
    ("tool", "asks", "arguments"),
    [
        (device_record, "current_environment", ()),
        (divided_overhead, "measure_overheads", ("--device", "cuda")),
        (engine_differences, "current_device", ("out.json",)),
        (record_engines, "described_device", ("out.json.gz",)),
    ],
)
def test_tools_tell_what_is_missing_in_one_line(
    tool: ModuleType, asks: str, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise UnavailableError("there is no GPU")

    monkeypatch.setattr(tool, asks, missing)
    result = CliRunner().invoke(tool.main, arguments)
    assert (result.exit_code, result.output) == (1, "Error: there is no GPU\n")


def test_tools_tell_what_cannot_be_written_before_they_ask_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_engines, "described_device", lambda properties: pytest.fail("a device was asked"))
    result = CliRunner().invoke(record_engines.main, [str(tmp_path / "nowhere" / "out.json.gz")])
    assert result.exit_code == 2
    assert "nowhere does not exist; make it, or name another file" in " ".join(result.output.split())


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_says_what_a_python_lacks() -> None:
    """One without installed packages."""
    command = ["make", "gpu", f"PYTHON={sys.executable} -S"]
    made = subprocess.run(command, cwd=suite_parts.ROOT, capture_output=True, text=True, check=False)
    assert made.returncode != 0
    assert "lacks torch, numpy, " in made.stderr
    assert "Traceback" not in made.stderr


def test_a_real_part_runs_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(suite_parts.ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "out"
    options = ["--device", "cpu", "--only", "overhead", "--minutes", "2", "--out", str(out)]
    result = CliRunner().invoke(main, options)
    assert result.exit_code == 0, summary(out)
    assert {path.name for path in out.iterdir()} == {"summary.json", "overhead.json", "overhead.log"}
    assert summary(out)["versions"]["torch"]


# The parts themselves


def test_tests_come_first_each_file_by_itself() -> None:
    tests = [part for part in parts("cuda") if part.arguments[0] == "pytest"]
    assert [part.name for part in tests][:2] == ["test_gpu", "test_gpu_models"]
    assert "test_engine_differences" in {part.name for part in tests}
    assert parts("cuda")[: len(tests)] == tuple(tests)
    for each in tests:
        assert Path(each.arguments[-1]).is_file()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_names_are_files_and_shares_leave_time_for_all(device: str) -> None:
    names = [part.name for part in parts(device)]
    assert len({*names}) == len(names)
    assert all(os.sep not in name for name in names)
    assert all(0 < part.share <= 1 for part in parts(device))
    assert all(part.share < 1 for part in parts(device)[:-1])


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(p, id=p.name)
        for p in parts("cuda")
        if p.name.startswith(("engines", "limits", "network", "training", "recipe"))
    ],
)
def test_commands_are_understood(part: SuitePart, tmp_path: Path) -> None:
    arguments = [argument.format(out=tmp_path, seconds="10") for argument in part.arguments[1:]]
    command: click.Command = mucudnn_command
    while isinstance(command, click.Group):
        command = command.commands[arguments.pop(0)]
    command.make_context(part.name, arguments)


def test_every_recipe_is_a_part() -> None:
    run = [part for part in parts("cuda") if part.arguments[:3] == ("mucudnn", "recipe", "run")]
    assert sorted(part.arguments[3] for part in run) == sorted(shipped_recipes())
    assert all(f"recipe-{part.arguments[3]}" == part.name for part in run)
