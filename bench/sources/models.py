"""Builds models (built-in networks or the user's own), and reports errors in the user's code as errors of the model."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from mucudnn.bench.sources.networks import NETWORKS, build, input_shape_of
from mucudnn.core.errors import InvalidInputError, MucudnnError, first_line
from mucudnn.core.problem import MOST_ELEMENTS, MemoryFormat, dtype_name
from mucudnn.core.values import did_you_mean, shown, whole
from mucudnn.kernels.memory import format_of
from mucudnn.measuring import operands

_SHAPE = "--input gives the shape of one sample, as 3x224x224"


def load_model(
    source: str,
    *,
    input_shape: tuple[int, ...] | None = None,
    dtype: str = "float32",
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS,
    initialised: bool = True,
) -> tuple[nn.Module, tuple[int, ...]]:
    """Return the model that ``source`` names, on the CPU, and the shape (C, H, W) of one sample.

    dtype: of the parameters.
    memory_format: of the parameters.
    initialised: whether the parameters of built-in networks are drawn from torch's random state; if not, which is
    faster, their values are arbitrary.

    Raises ``InvalidInputError`` for sources without a model (tables, CSV files), and as ``load_source`` does.
    """
    with importable(source):
        built = model_of(source, checked_shape(input_shape), initialised=initialised)
    if built is None:
        raise InvalidInputError(
            f"{source} has no model to run; {did_you_mean(source, NETWORKS)}name one of {', '.join(NETWORKS)}, "
            "package.module:factory, or file.py:factory"
        )
    model, shape = built
    return in_format(model.to(dtype=getattr(torch, dtype_name(dtype))), memory_format), shape


def model_of(
    source: str, input_shape: tuple[int, ...] | None, *, initialised: bool
) -> tuple[nn.Module, tuple[int, ...]] | None:
    """Return the model that ``source`` names and the shape (C, H, W) of one sample; None for a table or CSV file."""
    if source in NETWORKS:
        shape = input_shape or input_shape_of(source)
        if initialised or NETWORKS[source].package:  # which may compute as it builds
            return build(source), shape
        # Meta tensors are used for building only: a forward pass on them would load torch's compiler, which takes
        # longer.
        with torch.device("meta"):
            return build(source).to_empty(device="cpu"), shape
    if ":" not in source or Path(source).exists():
        return None
    if input_shape is None:
        raise InvalidInputError(f"{source} needs the shape of one sample; give --input, for example --input 3x224x224")
    return _user_model(source), input_shape


def in_format(model: nn.Module, memory_format: MemoryFormat) -> nn.Module:
    """Convert a model's filters to a memory format in place, and return the model.

    ``nn.Module.to`` takes the format of images or that of volumes, and raises an error for filters of the other kind.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dim() in (4, 5):
            tensor.data = tensor.data.to(memory_format=format_of(memory_format, tensor.dim()))
    return model


def checked_shape(shape: object) -> tuple[int, ...] | None:
    """Check a sample's shape, (C, H, W), (C, D, H, W) or (C, L), and return it; None stays None.

    Raises ``InvalidInputError`` if it is wrong.
    """
    if shape is None:
        return None
    if not (isinstance(shape, Sequence) and len(shape) in (2, 3, 4)):
        raise InvalidInputError(
            f"input shape is {shown(shape)}; give channels, height and width of one sample, of clips or volumes "
            "channels, depth, height and width, of sequences channels and length"
        )
    return tuple(whole(size, "a size of the input shape", 1, MOST_ELEMENTS) for size in shape)


def seeded_model(
    source: str,
    batch: int,
    device: str = "cpu",
    *,
    input_shape: tuple[int, ...] | None = None,
    dtype: str = "float32",
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS,
) -> tuple[nn.Module, Tensor]:
    """Return the model that ``source`` names, on a device, and images to call it with.

    Weights and inputs are the same every time, because they are drawn on the CPU with a fixed seed. Raises
    ``InvalidInputError`` as ``load_model`` does.
    """
    torch.manual_seed(0)
    model, shape = load_model(source, input_shape=input_shape, dtype=dtype, memory_format=memory_format)
    x = torch.randn(operands.input_shape(batch, shape), dtype=getattr(torch, dtype_name(dtype)))
    return model.to(device=device), x.to(device=device, memory_format=format_of(memory_format, x.dim()))


def _user_model(source: str) -> nn.Module:
    """Return the model that a user's module or file gives under a name, itself or by a function without arguments."""
    with _blamed(source, "cannot be built", "name a function that needs no arguments and returns a torch.nn.Module"):
        place, _, attribute = source.rpartition(":")
        module = _module_of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        if not hasattr(module, attribute):
            names = [
                name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
            ]
            have = f"it has {', '.join(names)}" if names else "it defines nothing"
            raise InvalidInputError(f"there is no {attribute!r} in {module.__name__}; {have}")
        model = getattr(module, attribute)
        if not isinstance(model, nn.Module):
            model = model()
        if isinstance(model, nn.Module):
            modes = {child: child.training for child in model.modules()}
            model.eval()  # modules of torch.export refuse it
            for child, training in modes.items():
                child.training = training
    if not isinstance(model, nn.Module):
        raise InvalidInputError(f"{source} gives {type(model).__name__}; it must give a torch.nn.Module")
    return model


@contextmanager
def importable(source: str) -> Iterator[None]:
    """Add the folder of the model's file, or else the current folder, to the import path within this context.

    ``python -m`` does the same, but an installed command has its own folder on the path, not the user's. Child
    processes inherit the path. For a network of mucudnn's own nothing is added: in a clone of it, child processes would
    import the clone, which is not compiled.
    """
    place, _, _ = source.rpartition(":")
    if not place:
        yield
        return
    folder = str(Path(place).resolve().parent if place.endswith(".py") else Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _module_of_file(path: Path) -> ModuleType:
    """Import a file as a module of the file's name; its folder must be on ``sys.path``.

    Child processes can then import the module too, and unpickle its classes. Raises ``InvalidInputError`` if another
    module has that name. Errors of the import propagate.
    """
    if not path.is_file():
        raise InvalidInputError(f"there is no file {path}")
    module = importlib.import_module(path.stem)
    if module.__file__ is None or not path.samefile(module.__file__):
        raise InvalidInputError(f"there is another module {path.stem}, {module.__file__}: give the file another name")
    return module


def blamed_in_computing(source: str, shape: Sequence[int]) -> AbstractContextManager[None]:
    """Return a context that converts errors of the forward pass to ``InvalidInputError`` with the model's name.

    shape: (N, C, H, W) of the input.
    """
    return _blamed(source, f"cannot compute an input of {'x'.join(map(str, shape))}", _SHAPE)


def blamed_in_training(source: str, shape: Sequence[int]) -> AbstractContextManager[None]:
    """Return a context that converts errors of a training step to ``InvalidInputError`` with the model's name.

    shape: (N, C, H, W) of the input. mucudnn's own errors are not changed.
    """
    return _blamed(
        source,
        f"cannot be trained on an input of {'x'.join(map(str, shape))}",
        f"{_SHAPE}, and --batch the batch size",
        passing=MucudnnError,
    )


@contextmanager
def _blamed(source: str, fault: str, advice: str, passing: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Convert any error of the user's code within this context to ``InvalidInputError`` with the model's name.

    fault: what failed.
    advice: what the user can do.
    passing: exceptions that are not changed.
    """
    try:
        yield
    except passing:
        raise
    except MucudnnError as error:
        raise InvalidInputError(f"{source} {fault}: {error}") from error
    except (Exception, SystemExit) as error:
        happened = f"it ended with exit status {error.code}" if isinstance(error, SystemExit) else first_line(error)
        place, where = source.rpartition(":")[0], ""
        file = Path(place if place.endswith(".py") else getattr(sys.modules.get(place), "__file__", None) or "")
        for frame in traceback.extract_tb(error.__traceback__):
            if Path(frame.filename).resolve() == file.resolve():
                where = f" in {file.name}, line {frame.lineno}"  # the last of the model's own file
        raise InvalidInputError(f"{source} {fault}: {happened} ({type(error).__name__}{where}); {advice}") from error
