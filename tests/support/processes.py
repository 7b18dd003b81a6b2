"""What a new process has loaded."""

import subprocess
import sys

HEAVY = ("torch", "cupy", "pulp", "pandas", "rich", "mucudnn.modules.conv2d")


def loaded_by(code: str) -> set[str]:
    """The heavy modules that a new process has loaded after ``code``."""
    probe = f"import sys\n{code}\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    return set(subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, text=True).stdout.split())
