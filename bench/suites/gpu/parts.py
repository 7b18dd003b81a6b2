"""Parts of ``make gpu``, in order of importance: one command each, with its share of the time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SuitePart:
    """One command: ``python -m`` and ``arguments``.

    In the arguments ``{out}`` stands for the folder of results, and ``{seconds}`` for the time that the command should
    take. That is less than its share, after which it is stopped. share: fraction of the time that is left when the part
    begins.
    """

    name: str
    arguments: tuple[str, ...]
    share: float


def find_root(file: Path) -> Path | None:
    """Find the checkout, or the unpacked sdist, in which ``file`` is this file; ``None``: it is installed.

    In an sdist bench/ lies in mucudnn/, where a checkout has a link to it.
    """
    return next((root for root in file.parents[3:5] if (root / "tests" / "gpu").is_dir()), None)


ROOT = find_root(Path(__file__).resolve())


def parts(device: str) -> tuple[SuitePart, ...]:
    """Tests, where there is a checkout, then benchmarks; on the CPU the same commands, small, to see that they run."""
    return (*_tests(device), *(_ON_CUDA if device == "cuda" else _ON_CPU))


def _tests(device: str) -> tuple[SuitePart, ...]:
    """A part for each test file: an engine that breaks the CUDA context takes only its own file's tests with it."""
    if ROOT is None:
        return ()
    tests = ROOT / "tests"
    of_gpu = sorted((tests / "gpu").glob("test_gpu*.py"))
    if device == "cpu":
        return tuple(_test(path) for path in of_gpu)
    marked = [path for path in sorted(tests.rglob("test_*.py")) if "mark.gpu" in path.read_text(encoding="utf-8")]
    return tuple(_test(path, "-m", "gpu") for path in dict.fromkeys((*of_gpu, *marked)))


def _test(path: Path, *chosen: str) -> SuitePart:
    """A part that runs one test file.

    It is verbose, so that the log tells each result as it comes. Warnings of other versions of libraries are no errors.
    """
    how = ("-vv", "-W", "default", "-p", "no:cacheprovider", "--durations=10")
    return SuitePart(path.stem, ("pytest", *chosen, *how, f"--junitxml={{out}}/{path.stem}.xml", str(path)), share=0.2)


def _engines(name: str, *asked: str) -> SuitePart:
    listed = ("mucudnn", "engines", "vgg16", "--layer", "features.10", "--batch", "64", *asked)
    return SuitePart(name, (*listed, "--json", f"{{out}}/{name}.json"), share=0.1)


def _limits(name: str, share: float, *asked: str) -> SuitePart:
    files = ("--csv", f"{{out}}/{name}.csv", "--json", f"{{out}}/{name}.json")
    return SuitePart(name, ("mucudnn", "bench", "limits", *asked, "--seconds", "{seconds}", *files), share)


def _network(name: str, share: float, *sizes: str) -> SuitePart:
    file = f"network-{name}"
    return SuitePart(file, ("mucudnn", "bench", "network", name, *sizes, "--json", f"{{out}}/{file}.json"), share)


def _training(name: str, share: float, *sizes: str) -> SuitePart:
    file = f"training-{name}"
    files = ("--csv", f"{{out}}/{file}.csv", "--json", f"{{out}}/{file}.json")
    return SuitePart(file, ("mucudnn", "bench", "training", name, *sizes, "--seconds", "{seconds}", *files), share)


def _recipes() -> tuple[SuitePart, ...]:
    """All recipes, each with as much of the time that is left as those after it. A later run goes on in the folders."""
    return tuple(
        SuitePart(
            f"recipe-{name}",
            ("mucudnn", "recipe", "run", name, "--device", "cuda", "--out", f"{{out}}/recipe-{name}"),
            share=1 / left,
        )
        for left, name in zip(range(len(RECIPES), 0, -1), RECIPES, strict=True)
    )


# The paper's experiments, the shorter ones first.
RECIPES = (
    "at-the-limit",
    "conv2-desirable-set",
    "three-policies",
    "reuse-against-division",
    "budget-division",
    "integer-program",
    "training-equality",
    "memory-per-layer",
    "deepbench",
    "networks-by-limit",
)
_OVERHEAD = ("mucudnn.bench.suites.overhead.divided", "--json", "{out}/overhead.json")
_GPU = ("--device", "cuda")
_SHORT = (*_GPU, "--time-limit", "1s")
_TINY = ("--batch", "1", "--rounds", "2", "--algorithms", "gemm", "--time-limit", "10ms", "--policy", "undivided")
_NOT_COMPILED = ("--variants", "torch-benchmark,mucudnn")

_ON_CUDA = (
    SuitePart(
        "engine-differences", ("mucudnn.bench.suites.gpu.engine_differences", "{out}/engine-differences.json"), 0.1
    ),
    _engines("engines-contiguous"),
    _engines("engines-channels-last", "--memory-format", "channels-last"),
    _engines("engines-bfloat16", "--memory-format", "channels-last", "--dtype", "bfloat16"),
    _limits("limits-contiguous", 0.45, *_GPU),
    _limits("limits-channels-last", 0.35, *_GPU, "--memory-format", "channels-last"),
    SuitePart("overhead", (*_OVERHEAD, *_GPU), 0.25),
    _network("alexnet", 0.25, *_SHORT, "--batch", "64"),
    _network("resnet18", 0.3, *_SHORT, "--batch", "64"),
    _network("vgg16", 0.3, *_SHORT, "--batch", "32"),
    _training("alexnet", 0.3, *_SHORT, *_NOT_COMPILED),
    _training("resnet50", 0.5, *_SHORT, *_NOT_COMPILED),
    _training("vgg16", 0.4, *_SHORT, *_NOT_COMPILED),
    *_recipes(),
)
_ON_CPU = (
    SuitePart("overhead", (*_OVERHEAD, "--rounds", "2"), 0.5),
    _network("alexnet", 0.5, *_TINY),
    _training("alexnet", 1.0, *_TINY, "--variants", "mucudnn"),
)
