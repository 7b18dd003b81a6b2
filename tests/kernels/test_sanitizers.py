"""``make sanitize`` can fail: what is wrong is reported, and the builds that it runs are the sanitized ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.compiled import algorithm
from support.places import TESTS

from mucudnn.kernels.compiled import library
from mucudnn.testing.guarded_call import sanitizer

IS_ASKED_FOR = bool(os.environ.get("MUCUDNN_SANITIZE"))
pytestmark = pytest.mark.skipif(not IS_ASKED_FOR, reason="only under make sanitize")
BEGIN = """
import torch
from mucudnn.testing.guarded_call import GuardedMemory
from mucudnn.kernels.compiled.library import library
from mucudnn.kernels.winograd.algorithms import Winograd
from mucudnn.words.problem import ConvProblem, Operation

problem = ConvProblem(Operation.FORWARD, 1, 3, 3, 1, 3, 3)
entries, w = Winograd(2, 3), torch.ones(problem.w_shape())
prepared = torch.zeros(entries.workspace(problem, 1).prepared_bytes, dtype=torch.uint8)
guarded, memory = GuardedMemory(), torch.zeros(8)
part = guarded.buffer(32)

def transform(filter_of_32_bytes):
    shapes, sizes = ((1, 1, 3, 3), (1, 1, 3, 3), (1, 1, 1, 1)), (0, prepared.nbytes, 0)
    stage = entries.stage(problem, shapes, 1, sizes, [slice(0, 1)])
    library().mucudnn_winograd_stage(stage, None, filter_of_32_bytes, None, None, prepared.data_ptr(), None, None)

"""
WRONG = {  # each lies about a buffer, which no check can see
    "read behind an allocation": (
        "transform(memory.data_ptr())",
        "AddressSanitizer: heap-buffer-overflow",
    ),
    "read in a guard zone": (
        "transform(part.data_ptr())",
        "AddressSanitizer: use-after-poison",
    ),
    "misaligned floats": (
        "u = torch.zeros(2**16, dtype=torch.uint8)[1:];entries.open(problem, w, u)",
        "misaligned address",
    ),
}


def test_the_builds_are_the_sanitized_ones() -> None:
    build = library.loaded_build()
    assert sanitizer() is not None
    assert build.library is not None
    assert "sanitized" in str(Path(library.__file__))
    assert build.name == os.environ.get("MUCUDNN_BUILD", build.name)


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_reported(what: str) -> None:
    algorithm("winograd-2x2")  # or this build has none
    call, report = WRONG[what]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(TESTS)])}
    command = [sys.executable, "-P", "-c", BEGIN + call]  # no folder before the sanitized one
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode != 0
    assert report in done.stderr
