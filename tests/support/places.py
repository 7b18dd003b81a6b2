"""Where the tests and their files are, and the builds that some of them need."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
DATA = TESTS / "data"
SNAPSHOTS = TESTS / "snapshots"
EXAMPLES = TESTS.parent / "examples"


def compile_builds() -> None:
    """Compile the builds of other instruction sets that are missing in this checkout, or older than their sources."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(command, cwd=TESTS.parent, env=os.environ | {"MUCUDNN_BUILDS": "all"}, check=True)
