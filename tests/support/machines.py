"""Run the tests that depend on the processor on simulated processors, one after the other: make test-machines.

torch and oneDNN can be told to use only some instruction sets, and mucudnn which of its builds to load. A simulated
processor is skipped where this one lacks an instruction set that it would have.
With --models-only, as in make test-all, only those run on which whole models are tested: one for each of oneDNN's sets.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import click
from places import compile_builds

KERNELS = ("tests/kernels/test_algorithm_contract.py",)
MODELS = (
    "tests/running/test_every_kind.py",
    "tests/running/test_compatibility.py",
    "tests/optimizing/test_optimize.py",
    "tests/tuning/test_tuner.py",
    "tests/tuning/test_determinism.py",
)
# What /proc/cpuinfo calls what a setting needs
NEEDED = {
    "AVX2": "avx2",
    "avx2": "avx2",
    "AVX512_CORE": "avx512f",
    "avx512": "avx512f",
    "AVX512_CORE_BF16": "avx512_bf16",
    "AVX512_CORE_AMX": "amx_bf16",
}

MODELS_ONLY = "--models-only"


@dataclass(frozen=True)
class SimulatedMachine:
    """What oneDNN, torch and mucudnn may use of a processor, the number of threads, and the tests that run there."""

    onednn: str
    torch: str
    build: str
    threads: int
    tests: tuple[str, ...] = KERNELS

    def __str__(self) -> str:
        return f"oneDNN {self.onednn}, torch {self.torch}, our build {self.build}, {self.threads} thread(s)"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "ONEDNN_MAX_CPU_ISA": self.onednn,
            "ATEN_CPU_CAPABILITY": self.torch,
            "MUCUDNN_BUILD": self.build,
            "MUCUDNN_TEST_THREADS": str(self.threads),
            "OMP_WAIT_POLICY": "passive",  # there may be more threads than cores
        }

    def lacking(self) -> list[str]:
        """Instruction sets that it would have and this processor has not."""
        there = set(Path("/proc/cpuinfo").read_text().split())
        needed = {NEEDED[setting] for setting in (self.onednn, self.torch, self.build) if setting in NEEDED}
        return sorted(needed - there)


# Every pair of oneDNN's and torch's instruction sets, each of them with 1, 2 and 4 threads. Our build needs torch's.
# Whole models take longer, and run once with each of oneDNN's.
MACHINES = (
    SimulatedMachine("AVX2", "default", "plain", 1, KERNELS + MODELS),
    SimulatedMachine("AVX2", "avx2", "avx2", 2),
    SimulatedMachine("AVX2", "avx512", "avx512", 4),
    SimulatedMachine("AVX512_CORE", "avx2", "avx2", 1),
    SimulatedMachine("AVX512_CORE", "avx512", "avx512", 2, KERNELS + MODELS),
    SimulatedMachine("AVX512_CORE", "default", "plain", 4),
    SimulatedMachine("AVX512_CORE_BF16", "avx512", "avx512", 1),
    SimulatedMachine("AVX512_CORE_BF16", "default", "plain", 2),
    SimulatedMachine("AVX512_CORE_BF16", "avx2", "avx2", 4, KERNELS + MODELS),
    SimulatedMachine("AVX512_CORE_AMX", "default", "plain", 1),
    SimulatedMachine("AVX512_CORE_AMX", "avx2", "plain", 2),
    SimulatedMachine("AVX512_CORE_AMX", "avx512", "avx2", 4, KERNELS + MODELS),
)


def main(options: list[str]) -> int:
    """Run pytest with the options on each machine; return 1 if it failed on any, after all have run."""
    compile_builds()
    failed = []
    every = [machine for machine in MACHINES if MODELS_ONLY not in options or machine.tests != KERNELS]
    options = [option for option in options if option != MODELS_ONLY]
    for machine in every:
        if lacking := machine.lacking():
            click.echo(f"skipped: {machine}: this processor has no {', '.join(lacking)}")
            continue
        click.echo(f"machine: {machine}")
        begun = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, *machine.tests],
            env=os.environ | machine.environment,
            check=False,
        )
        click.echo(f"{time.monotonic() - begun:.0f} s")
        failed += [machine] if done.returncode else []
    for machine in failed:
        click.echo(
            f"failed: {machine}\n    {' '.join(f'{name}={value}' for name, value in machine.environment.items())}"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
