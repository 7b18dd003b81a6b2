"""The environment: part of every database key, so each of its fields must follow what it describes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mucudnn import environment
from mucudnn.environment import current_environment, library_version
from mucudnn.errors import UnavailableError


def test_it_is_the_same_twice_and_can_be_a_key() -> None:
    assert {current_environment(): 1}[current_environment()] == 1


def test_threads_are_those_of_the_moment() -> None:
    before = current_environment()
    torch.set_num_threads(1)
    assert current_environment() == replace(before, threads=1)


def test_versions_are_torchs() -> None:
    now = current_environment()
    assert now.torch == torch.__version__
    assert now.library.startswith("oneDNN ")
    assert now.library.removeprefix("oneDNN ") in torch.__config__.show()
    assert now.capability == torch.backends.cpu.get_cpu_capability()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("  - Intel(R) MKL-DNN v3.12.0 (Git Hash 80afa71)\n  - OpenMP 201511", "oneDNN 3.12.0"),
        ("  - oneDNN v4.0.1 (Git Hash 80afa71)", "oneDNN 4.0.1"),
        ("  - OpenMP 201511", "no oneDNN"),
    ],
)
def test_library_version(config: str, expected: str) -> None:
    assert library_version(config) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor : 0\nmodel name\t: AMD EPYC 9R14 \nprocessor : 1\nmodel name\t: other\n", "AMD EPYC 9R14"),
        ("processor : 0\nBogoMIPS : 50\n", "some-architecture"),
        (None, "some-architecture"),
    ],
)
def test_cpu_model(text: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    if text is not None:
        info.write_text(text)
    monkeypatch.setattr(environment, "_CPU_INFO", info)
    monkeypatch.setattr("platform.machine", lambda: "some-architecture")
    assert environment.cpu_model() == expected


def test_other_devices_are_refused_by_name() -> None:
    with pytest.raises(UnavailableError, match=r"'tpu'.*device='cpu'"):
        current_environment("tpu")


def test_for_people() -> None:
    shown = str(replace(current_environment(), device="AMD EPYC", capability="AVX512", threads=1))
    assert shown.startswith("AMD EPYC (AVX512), 1 thread, torch 2.")


def test_database_and_environment_load_no_torch() -> None:
    code = "import sys, mucudnn.database, mucudnn.environment; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
