"""``make sanitize`` can fail: what is wrong is reported, and the builds that it runs are the sanitized ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.places import TESTS

from mucudnn.kernels.compiled import library
from mucudnn.testing.guarded_call import sanitizer

IS_ASKED_FOR = bool(os.environ.get("MUCUDNN_SANITIZE"))
pytestmark = pytest.mark.skipif(not IS_ASKED_FOR, reason="only under make sanitize")
BEGIN = """
import torch
from mucudnn.testing.guarded_call import GuardedMemory
from mucudnn.kernels.compiled.library import library
from mucudnn.kernels.compiled.stages import Entries
from mucudnn.words.problem import ConvProblem, Operation

guarded, memory = GuardedMemory(), torch.zeros(4096, dtype=torch.uint8)
part = guarded.buffer(100)
"""
WRONG = {  # each lies about a buffer, which no check can see
    "read behind an allocation": (
        "library().mucudnn_fingerprint(memory.data_ptr(), 3 * 4096, 1)",
        "AddressSanitizer: heap-buffer-overflow",
    ),
    "read in a guard zone": (
        "library().mucudnn_fingerprint(part.data_ptr(), 101, 1)",
        "AddressSanitizer: use-after-poison",
    ),
    "misaligned floats": (
        "problem = ConvProblem(Operation.FORWARD, 1, 3, 3, 1, 3, 3);"
        "u = torch.zeros(2**16, dtype=torch.uint8)[1:];"
        "Entries('winograd', 2).open(problem, torch.zeros(problem.w_shape()), u)",
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
    call, report = WRONG[what]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(TESTS)])}
    command = [sys.executable, "-P", "-c", BEGIN + call]  # no folder before the sanitized one
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode != 0
    assert report in done.stderr
