"""``make sanitize`` can fail: what is wrong is reported, and the builds that it runs are the sanitized ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.places import TESTS

from mucudnn.kernels.compiled import library
from mucudnn.testing.checks import sanitizer

IS_ASKED_FOR = bool(os.environ.get("MUCUDNN_SANITIZE"))
pytestmark = pytest.mark.skipif(not IS_ASKED_FOR, reason="only under make sanitize")
BEGIN = """
import torch
from mucudnn.testing.checks import GuardedMemory
from mucudnn.kernels.compiled.algorithms import LOOP_NEST
from mucudnn.kernels.compiled.library import function
from mucudnn.core.problem import ConvProblem, Operation

torch.set_num_threads(1)  # the first byte behind a buffer is the first wrong one that is read
problem = ConvProblem(Operation.FORWARD, 1, 16, 16, 1, 3, 3)
w, y = torch.ones(problem.w_shape()), torch.empty(problem.y_shape(1))
guarded, memory, floats = GuardedMemory(), torch.zeros(8), torch.zeros(2**16)
part = guarded.buffer(32)

def read(x):
    shapes = problem.x_shape(1), problem.w_shape(), problem.y_shape(1)
    stage = LOOP_NEST.stage(problem, shapes, 7, (0, 0, 0), [slice(0, 1)])
    function("loop_nest_stage")(stage, x, w.data_ptr(), y.data_ptr(), None, None, None, None)

"""
WRONG = {  # each lies about a buffer, which no check can see
    "read behind an allocation": ("read(memory.data_ptr())", "AddressSanitizer: heap-buffer-overflow"),
    "read in a guard zone": ("read(part.data_ptr())", "AddressSanitizer: use-after-poison"),
    "misaligned floats": ("read(floats.data_ptr() + 1)", "misaligned address"),
}


def test_the_builds_are_the_sanitized_ones() -> None:
    build = library.loaded_build()
    assert sanitizer() is not None
    assert build.library is not None
    assert "sanitized" in str(Path(library.__file__))
    assert build.name == os.environ.get("MUCUDNN_BUILD", build.name)


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_reported(what: str) -> None:
    call, report = WRONG[what]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(TESTS)])}
    command = [sys.executable, "-P", "-c", BEGIN + call]  # no folder before the sanitized one
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode != 0
    assert report in done.stderr
