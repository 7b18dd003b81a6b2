"""The environment: part of every database key, so each of its fields must follow what it describes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mucudnn.core.errors import UnavailableError
from mucudnn.core.records import Environment
from mucudnn.kernels.cudnn import library as cudnn_library
from mucudnn.running.devices import current_environment


def test_it_is_a_key_of_plain_values_with_the_threads_of_the_moment() -> None:
    """Torch's version is of a class of its own, which takes 2.13 and 2.13.0 for equal."""
    before = current_environment()
    assert {before: 1}[current_environment()] == 1
    assert {type(value) for value in asdict(before).values()} == {str, int}
    torch.set_num_threads(1)
    assert current_environment() == replace(before, threads=1)
    shown = str(replace(before, device="AMD EPYC", capability="AVX512", threads=1))
    assert shown.startswith("AMD EPYC (AVX512), 1 thread, torch 2.")
    with pytest.raises(UnavailableError, match=r"'tpu'.*device='cpu'"):
        current_environment("tpu")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch with a GPU, and a cuDNN, as far as they are asked."""
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(cudnn_library, "library", lambda: SimpleNamespace(version_text="9.19.0"))


@pytest.mark.usefixtures("gpu")
def test_on_a_gpu_it_is_the_device_cudnn_and_the_numerics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    now = current_environment("cuda")
    assert now == Environment("NVIDIA H200", "sm90", 1, torch.__version__, "cuDNN 9.19.0", "torch", now.numerics)
    assert str(now) == f"NVIDIA H200 (sm90), torch {torch.__version__}, cuDNN 9.19.0, {now.numerics}"
    torch.set_num_threads(2)
    assert current_environment("cuda") == now
    with torch.backends.cudnn.flags(deterministic=True, allow_tf32=True):
        deterministic = current_environment("cuda")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    with torch.backends.cudnn.flags(allow_tf32=False):
        exact = current_environment("cuda")
    assert len({now.numerics, deterministic.numerics, exact.numerics, current_environment("cuda").numerics}) == 4
    assert current_environment().numerics == ""


def test_without_cuda_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    with pytest.raises(UnavailableError, match="is built without CUDA: install a CUDA build of torch, or use device"):
        current_environment("cuda")
    monkeypatch.setattr("torch.version.cuda", "13.0")
    with monkeypatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: True)
        patch.setattr(cudnn_library, "library", lambda: cudnn_library.Library(str(tmp_path / "libcudnn.so.9")))
        with pytest.raises(UnavailableError, match=r"there is no cuDNN: .*install a CUDA build of torch"):
            current_environment("cuda")

    def no_driver() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check that you have a GPU")

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.init", no_driver)
    with pytest.raises(
        UnavailableError, match=r"can use no GPU: Found no NVIDIA driver on your system\.; see nvidia-smi"
    ):
        current_environment("cuda")


def test_the_database_loads_no_torch() -> None:
    code = "import sys, mucudnn.store.database; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
