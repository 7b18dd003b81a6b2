"""Torch's settings and a config's own rules: which engines and errors they allow."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from mucudnn.core.config import DEFAULT_MAX_RELATIVE_ERROR, TF32_MAX_RELATIVE_ERROR, Config
from mucudnn.core.errors import InvalidInputError, first_line
from mucudnn.core.torch_settings import TorchSettings, deterministic_torch
from mucudnn.kernels.cudnn.backend import Engine, EngineConfig, why_barred
from mucudnn.kernels.cudnn.descriptor import NumericalNote

EXACT, TENSOR_CORE, ROUNDED, ANY_ORDER = (
    Engine(EngineConfig(0), frozenset(notes), 0)
    for notes in (
        (),
        (NumericalNote.TENSOR_CORE,),
        (NumericalNote.TENSOR_CORE, NumericalNote.DOWN_CONVERT_INPUTS),
        (NumericalNote.NONDETERMINISTIC,),
    )
)
HALVES = ("float16", "bfloat16")
OFF, OVERRIDDEN = "torch.backends.cudnn.allow_tf32 is off", "NVIDIA_TF32_OVERRIDE is 0"
# Settings, an engine, dtypes, and why it is barred; an empty text: it is allowed.
BARRED = (
    (TorchSettings(), ROUNDED, ("float32", "float64", *HALVES), "rounds its inputs to a smaller type"),
    (TorchSettings(False, True, "0"), EXACT, ("float32", "float64", *HALVES), ""),
    (TorchSettings(), TENSOR_CORE, ("float32", "float64", *HALVES), ""),
    (TorchSettings(allow_tf32=False), TENSOR_CORE, ("float32",), OFF),
    (TorchSettings(allow_tf32=False), TENSOR_CORE, ("float64", *HALVES), ""),
    (TorchSettings(tf32_override="0"), TENSOR_CORE, ("float32",), OVERRIDDEN),
    (TorchSettings(tf32_override="1"), TENSOR_CORE, ("float32",), ""),
    (TorchSettings(), ANY_ORDER, ("float32",), ""),
    (TorchSettings(deterministic=True), ANY_ORDER, ("float32",), "not deterministic"),
    (TorchSettings(deterministic=True), TENSOR_CORE, ("float32",), ""),
    (TorchSettings(cudnn=False), EXACT, ("float64",), "torch.backends.cudnn.enabled is off"),
)


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch's own, put back afterwards."""
    for variable in ("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(variable, raising=False)
    yield
    torch.backends.cudnn.deterministic = False
    torch.use_deterministic_algorithms(False)


def test_engines_are_barred_for_what_torch_would_not_do() -> None:
    for numerics, engine, dtypes, expected in BARRED:
        for dtype in dtypes:
            reason = why_barred(numerics, engine, dtype)
            assert expected in reason if reason else not expected, (numerics, engine, dtype, reason)


FORBID = """
for owner, name, forbidding, neutral in (
    (torch.backends, "fp32_precision", "ieee", "none"),
    (torch.backends.cudnn, "fp32_precision", "ieee", "none"),
    (torch.backends.cudnn, "allow_tf32", False, True),
    (torch.backends.cudnn.conv, "fp32_precision", "ieee", "tf32"),
):
    setattr(owner, name, forbidding)
    print(TorchSettings.current().allow_tf32, torch.backends.cudnn.conv.fp32_precision == "tf32", end=" ")
    setattr(owner, name, neutral)
    print(TorchSettings.current().allow_tf32)
"""
MIX = """
matmul = torch.backends.cuda.matmul
for change in (
    lambda: torch.set_float32_matmul_precision("high"),
    lambda: torch.set_float32_matmul_precision("medium"),
    lambda: setattr(matmul, "fp32_precision", "ieee"),
    lambda: setattr(matmul, "fp32_precision", "tf32"),
    lambda: setattr(matmul, "allow_tf32", False),
    lambda: setattr(matmul, "allow_tf32", True),
    lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
):
    change()
    print(TorchSettings.current())
"""


def lines_of(program: str) -> list[str]:
    """Run a program in a process of its own, in which a warning is an error; return what it prints."""
    start = "import torch\nfrom mucudnn.core.torch_settings import TorchSettings\n"
    command = [sys.executable, "-W", "error", "-c", start + program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_every_way_to_forbid_and_to_allow_tf32_is_heeded_however_they_are_mixed() -> None:
    """In processes of their own: torch's older getters raise once both kinds were set.

    Once ``allow_tf32`` was set, torch heeds the general ones no more. Torch 2.11 never does: there convolutions have a
    setting of their own from the start.
    """
    for_all, for_cudnn, *for_convolutions = lines_of(FORBID)
    assert {for_all, for_cudnn} <= {"False False True", "True True True"}
    assert for_convolutions == ["False False True"] * 2
    allowed, forbidden = "tf32 matmul-tf32", "tf32"
    assert lines_of(MIX) == [allowed, allowed, forbidden, allowed, forbidden, allowed, "no-tf32 matmul-tf32"]


@pytest.mark.parametrize(
    ("owner", "name", "value", "word"),
    [
        (torch.backends.cudnn, "enabled", False, "no-cudnn"),
        (torch.backends.cudnn, "benchmark", True, "benchmark=10"),
        (torch.backends.cudnn, "deterministic", True, "deterministic"),
        (torch.backends.cuda.matmul, "allow_fp16_accumulation", True, "allow_fp16_accumulation=True"),
    ],
)
def test_what_changes_times_is_part_of_the_key(
    owner: object, name: str, value: bool, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark_limit", 10)  # of CUDA builds alone
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        assert str(TorchSettings.current()) == f"tf32 {word}"
    finally:
        setattr(owner, name, before)
    assert str(TorchSettings.current()) == "tf32", "as measurements have it that were made before there were more"


def test_the_environment_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert TorchSettings.current() == TorchSettings(tf32_override="0")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert str(TorchSettings.current()) == "tf32 NVIDIA_TF32_OVERRIDE=0 CUBLAS_WORKSPACE_CONFIG=:4096:8"
    assert str(TorchSettings(False, True, "0")) == "no-tf32 deterministic NVIDIA_TF32_OVERRIDE=0"


@pytest.mark.parametrize("before", [False, True])
def test_torch_is_asked_for_determinism_for_a_while(before: bool) -> None:
    torch.backends.cudnn.deterministic = before
    with deterministic_torch(asked=False):
        assert TorchSettings.current().deterministic is before
    with pytest.raises(ZeroDivisionError), deterministic_torch(asked=True):
        1 / (0 if TorchSettings.current().deterministic else 1)
    assert TorchSettings.current().deterministic is before
    torch.use_deterministic_algorithms(True)
    assert TorchSettings.current().deterministic


# A config's own rules.


@pytest.mark.parametrize(
    ("numerics", "rounds"),
    [
        ("", False),
        ("tf32", True),
        ("tf32 deterministic benchmark=10", True),
        ("no-tf32 matmul-tf32", False),
        ("tf32 NVIDIA_TF32_OVERRIDE=0 matmul-tf32", False),
        ("tf32 NVIDIA_TF32_OVERRIDE=1", True),
        ("tf32 no-cudnn", False),
        ("no-tf32 no-cudnn matmul-tf32", True),
        ("tf32 NVIDIA_TF32_OVERRIDE=0 no-cudnn matmul-tf32", False),
    ],
)
def test_errors_of_tf32_are_allowed_where_torchs_own_convolution_rounds_to_it(numerics: str, rounds: bool) -> None:
    expected = TF32_MAX_RELATIVE_ERROR if rounds else DEFAULT_MAX_RELATIVE_ERROR["float32"]
    assert Config().error_bound("float32", numerics) == expected
    for dtype in ("float64", "float16", "bfloat16"):
        assert Config().error_bound(dtype, numerics) == DEFAULT_MAX_RELATIVE_ERROR[dtype]
    assert Config(max_relative_error=1e-7).error_bound("float32", numerics) == 1e-7


@pytest.mark.parametrize(
    ("typo", "hint"),
    [
        ("workspace_limt", r"did you mean workspace_limit\?"),
        ("Strict", r"did you mean strict\?"),
        ("colour", "its settings are"),
    ],
)
def test_a_setting_that_does_not_exist_is_refused_with_the_one_that_is_meant(typo: str, hint: str) -> None:
    for make in (Config, partial(replace, Config())):
        with pytest.raises(InvalidInputError, match=f"Config has no setting {typo}; .*{hint}"):
            make(**{typo: 1})
    assert pickle.loads(pickle.dumps(Config(strict=True))) == copy.deepcopy(Config(strict=True)) == Config(strict=True)


@pytest.mark.parametrize(
    ("given", "fits"),
    [
        ({}, True),
        ({"workspace_limit": "64MiB"}, True),
        ({"workspace_limit": "8MiB"}, False),
        ({"workspace_limit": 64 * 2**20}, False),
        ({"workspace_budget": "64MiB"}, False),
    ],
)
def test_which_limits_hold_torchs_own(given: dict[str, object], fits: bool) -> None:
    assert Config(**given).baseline_exempt is fits


# Errors, told.


def test_the_first_line_says_what_happened() -> None:
    assert first_line(RuntimeError("out of memory\na stack trace")) == "out of memory"
    assert first_line(RuntimeError()) == "RuntimeError"
