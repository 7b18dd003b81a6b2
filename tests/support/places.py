"""Where the tests and their files are."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
DATA = TESTS / "data"
SNAPSHOTS = TESTS / "snapshots"
SUPPORT = TESTS / "support"
EXAMPLES = TESTS.parent / "examples"
