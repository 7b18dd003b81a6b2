"""General code knows no library: the name of one occurs where it is driven, set, shown or measured, nowhere else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mucudnn

# The name of this package, and that of the paper's, have the word in them; so have alternatives, and ATen's batch norm.
WORDS = re.compile(r"(?<![uμ])(?<!μ-)cudnn|(?<!alter)(?<!aten\._)native", re.IGNORECASE)
ROOT = Path(mucudnn.__file__).parent
ALLOWED = (
    "kernels",  # drives it
    "words/torch_settings.py",  # sets it
    "words/config.py",  # lists the variables of the environment
    "cli",  # shows it
    "bench/contests/timing.py",  # searches as it does
)


def modules() -> list[Path]:
    """Paths below the package; its links to other folders are followed."""
    every = [path for folder in ROOT.iterdir() for path in folder.glob("**/*.py")] + [*ROOT.glob("*.py")]
    return sorted(path.relative_to(ROOT) for path in every)


def is_allowed(module: Path) -> bool:
    return any(module.is_relative_to(place) for place in ALLOWED)


def test_general_code_does_not_name_them() -> None:
    named = [
        f"{module}:{number}: {line.strip()}"
        for module in modules()
        if not is_allowed(module)
        for number, line in enumerate((ROOT / module).read_text(encoding="utf-8").splitlines(), start=1)
        if WORDS.search(line)
    ]
    assert named == []


@pytest.mark.parametrize("place", ALLOWED)
def test_every_place_that_may_name_them_does(place: str) -> None:
    within = [module for module in modules() if module.is_relative_to(place)]
    assert any(WORDS.search((ROOT / module).read_text(encoding="utf-8")) for module in within)


@pytest.mark.parametrize(
    ("text", "is_named"),
    [
        ("cuDNN 9", True),
        ("torch.backends.cudnn", True),
        ("is_native", True),
        ("NATIVE", True),
        ("mucudnn", False),
        ("MUCUDNN_FUZZ", False),
        ("μ-cuDNN, section III", False),
        ("alternatives", False),
    ],
)
def test_what_counts_as_a_name(text: str, is_named: bool) -> None:
    assert (WORDS.search(text) is not None) == is_named
