"""``mucudnn run``: programs that nobody changed end, fail and print as under ``python``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.ranks.launching import torchrun

PLAIN = """
import sys
print(__name__, __file__, __package__, sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is globals())
"""
ENDINGS = {
    "ends": "",
    "exits": "sys.exit(3)",
    "says": "sys.exit('no data')",
    "fails": "def inner():\n    raise ValueError('wrong')\ninner()",
    "broken": "x = (",
    "interrupted": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time; time.sleep(5)",
    "hooked": "sys.excepthook = lambda kind, error, trace: print(kind, error)\n1 / 0",
}
TRAINING = """
import os, signal, sys, torch
import mucudnn.enabling.session
mucudnn.enabling.session.PATIENCE = 0.0  # tuned at the first call
layer = torch.nn.Conv2d(3, 8, 3)
for _ in range(3):
    layer(torch.randn(2, 3, 16, 16)).sum().backward()
if hasattr(signal, "SIGUSR2"):
    os.kill(os.getpid(), signal.SIGUSR2)
print("trained", flush=True)
"""
DISTRIBUTED = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
layer = torch.nn.parallel.DistributedDataParallel(torch.nn.Conv2d(3, 8, 3))
layer(torch.randn(2, 3, 16, 16)).sum().backward()
dist.destroy_process_group()
raise SystemExit(f"rank ended")
"""
QUICK = ("--time-limit", "20ms")


def python(*arguments: object, cwd: Path, **environment: str) -> tuple[int, str, str]:
    """Run Python; return its exit status, standard output and standard error."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "MUCUDNN_DATABASE": str(cwd / "m.sqlite"), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_program_ends_and_fails_as_under_python(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    for name, ending in ENDINGS.items():
        (package / "__main__.py").write_text(PLAIN + ending)
        (tmp_path / "program.py").write_text(PLAIN + ending)
        with zipfile.ZipFile(tmp_path / "packed", "w") as packed:
            packed.write(package / "__main__.py", "__main__.py")
        modules = (["-m", "package"], ["-m", "program"], ["package"], ["packed"])
        programs = (["program.py"], *modules, [tmp_path / "program.py"])
        for program in programs if name == "fails" else programs[: 1 + (name == "hooked")]:
            expected = python(*program, "a", "--strict", cwd=tmp_path)
            found = python("-m", "mucudnn", "run", "--strict", *program, "a", "--strict", cwd=tmp_path)
            if program[0] in ("-m", "package", "packed"):  # Python's own traceback shows how it found the module, too
                expected, found = ((*one[:2], _from_first_frame(one[2], tmp_path)) for one in (expected, found))
            assert found == expected, (name, program)


def _from_first_frame(errors: str, folder: Path) -> str:
    return errors[errors.find(f'File "{folder}') :]


def test_a_program_that_is_missing_is_named(tmp_path: Path) -> None:
    assert python("-m", "mucudnn", "run", "no.py", cwd=tmp_path) == (
        1,
        "",
        "mucudnn: 'no.py' cannot be read: No such file or directory; name a Python file, or -m MODULE\n",
    )
    status, _, errors = python("-m", "mucudnn", "run", "-m", "no.module", cwd=tmp_path)
    assert (status, "no module no.module" in errors) == (1, True)
    (tmp_path / "empty").mkdir()
    status, _, errors = python("-m", "mucudnn", "run", "empty", cwd=tmp_path)
    assert (status, "there is no __main__.py in 'empty'" in errors) == (1, True)
    status, _, errors = python("-m", "mucudnn", "run", "no.py", cwd=tmp_path, MUCUDNN_OPERATIONS="sideways")
    assert (status, "one of operations is 'sideways'" in errors) == (2, True)


def test_convolutions_are_tuned_as_the_command_or_the_environment_says(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    options = (*QUICK, "--report", "page.html")
    status, output, errors = python("-m", "mucudnn", "run", *options, "train.py", cwd=tmp_path)
    assert (status, output) == (0, "trained\n")
    told = [line for line in errors.splitlines() if line.startswith("mucudnn: ")]
    assert len(told) == 1 + hasattr(signal, "SIGUSR2")
    assert all("2 problems: 2 measured; tuning took" in line for line in told)
    page = (tmp_path / "page.html").read_text()
    assert "<title>mucudnn run train.py</title>" in page
    assert page.count(">float32<") == 2  # of the problems, with all that is known of them
    tell = "import sys, mucudnn\nprint('torch' in sys.modules)\n" + TRAINING.replace("SIGUSR2", "SIGNONE")
    (tmp_path / "program.py").write_text(tell + "print(mucudnn.status())")
    status, output, errors = python("program.py", cwd=tmp_path, MUCUDNN_ENABLE="1", MUCUDNN_OPERATIONS="forward")
    assert (status, output.splitlines()[:2]) == (0, ["False", "trained"]), errors
    assert "1 problem: 1 database" in output, "enabled by the environment, it finds what was measured"
    wrong = python("-c", "import mucudnn, torch", cwd=tmp_path, MUCUDNN_ENABLE="1", MUCUDNN_POLICY="some")
    assert wrong[:2] == (0, "")
    assert "mucudnn is not enabled: policy is 'some'" in wrong[2]


@pytest.mark.slow
def test_ranks_of_torchrun_run_the_program_and_the_first_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "train.py"
    program.write_text(DISTRIBUTED)
    monkeypatch.setenv("MUCUDNN_DATABASE", str(tmp_path / "m.sqlite"))
    done = torchrun("-m", "mucudnn", "run", *QUICK, program, ranks=2)
    assert done.returncode == 1
    assert done.stderr.count("rank ended") == 2
    assert done.stderr.count("mucudnn: 2 problems") == 1
