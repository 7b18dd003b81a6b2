"""Labelled images: CIFAR-10 and MNIST from their published files, scikit-learn's digits, and synthetic images."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mucudnn.words.errors import InvalidInputError, UnavailableError

CLASSES = 10  # number of classes in every data set
_CIFAR_BYTES = 1 + 3 * 32 * 32  # A record is a label, followed by red, green and blue rows.
_CIFAR_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_CIFAR_TEST = "test_batch.bin"
_IDX_BYTES = 0x08  # type code of unsigned bytes
_WHERE = {
    "cifar10": "https://www.cs.toronto.edu/~kriz/cifar.html (binary version)",
    "mnist": "https://yann.lecun.com/exdb/mnist, or https://ossci-datasets.s3.amazonaws.com/mnist",
}


@dataclass(frozen=True, slots=True)
class Images:
    """Images, (N, 3, H, W) of float32, overall mean 0 and deviation 1, with labels, (N,), for training and testing."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @property
    def shape(self) -> tuple[int, int, int]:
        _, c, h, w = self.train[0].shape
        return c, h, w


def load_images(name: str) -> Images:
    """Load the images named by a text such as ``digits``, ``cifar-shaped``, ``cifar10:DIR`` or ``mnist:DIR``.

    Raises ``InvalidInputError`` for other texts, and for files that are missing or not as published, with the place to
    get them; ``UnavailableError`` if scikit-learn, which has the digits, is not installed.
    """
    kind, colon, folder = name.partition(":")
    if colon and kind in _READERS:
        return _READERS[kind](Path(folder).expanduser())
    if name in _MADE:
        return _MADE[name]()
    allowed = ", ".join((*_MADE, *(f"{kind}:DIR" for kind in _READERS)))
    raise InvalidInputError(f"the data are {name!r}; allowed are {allowed}, where DIR has the published files")


def _standardized(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> Images:
    deviation, mean = torch.std_mean(train[0])
    x, test_x = (((images - mean) / deviation).expand(-1, 3, -1, -1).contiguous() for images in (train[0], test[0]))
    return Images((x, train[1]), (test_x, test[1]))


def _digits() -> Images:
    """Return the 1797 digits of scikit-learn, 8x8 pixels, half of them for training."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UnavailableError("the digits need scikit-learn: pip install 'mucudnn[examples]'") from None
    loaded = load_digits()
    images = torch.tensor(loaded.images, dtype=torch.float32).unsqueeze(1)
    return _standardized(*_halves(images, torch.tensor(loaded.target)))


def _cifar_shaped() -> Images:
    """Return synthetic images, 3x32x32: each class has a pattern, which is shifted, scaled in contrast, and noisy."""
    count, generator = 1536, torch.Generator().manual_seed(0)
    patterns = F.interpolate(torch.randn(CLASSES, 3, 8, 8, generator=generator), size=(32, 32), mode="bilinear")
    labels = torch.randint(CLASSES, (count,), generator=generator)
    shifts = torch.randint(-2, 3, (count, 2), generator=generator).tolist()
    images = torch.stack([patterns[label].roll(by, (1, 2)) for label, by in zip(labels, shifts, strict=True)])
    contrasts = 0.5 + torch.rand(count, 1, 1, 1, generator=generator)
    return _standardized(*_halves(contrasts * images + torch.randn(images.shape, generator=generator) / 2, labels))


def _halves(images: Tensor, labels: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Divide images into two halves at random, but in the same way every time."""
    train, test = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).chunk(2)
    return (images[train], labels[train]), (images[test], labels[test])


def _cifar10(folder: Path) -> Images:
    folder = folder / "cifar-10-batches-bin" if (folder / "cifar-10-batches-bin").is_dir() else folder
    parts = [_cifar_file(folder / name) for name in _CIFAR_FILES]
    train = torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts])
    return _standardized(train, _cifar_file(folder / _CIFAR_TEST))


def _cifar_file(path: Path) -> tuple[Tensor, Tensor]:
    content = np.frombuffer(_content(path, "cifar10"), np.uint8)
    if content.size == 0 or content.size % _CIFAR_BYTES:
        raise InvalidInputError(f"{path} is no file of CIFAR-10's binary version: get it from {_WHERE['cifar10']}")
    records = torch.from_numpy(content.reshape(-1, _CIFAR_BYTES).copy())
    return records[:, 1:].reshape(-1, 3, 32, 32).float(), _labels(records[:, 0], path)


def _mnist(folder: Path) -> Images:
    train, test = (
        (
            _idx_file(folder / f"{part}-images-idx3-ubyte", 3).unsqueeze(1).float(),
            _labels(_idx_file(folder / f"{part}-labels-idx1-ubyte", 1), folder),
        )
        for part in ("train", "t10k")
    )
    for images, labels in (train, test):
        if len(images) != len(labels):
            raise InvalidInputError(f"{folder} has {len(images)} images and {len(labels)} labels: get both anew")
    return _standardized(train, test)


def _idx_file(path: Path, dimensions: int) -> Tensor:
    """Read the bytes of an IDX file as a tensor. Format: two zero bytes, type, number of dimensions, sizes, values."""
    content = _content(path, "mnist")
    start = 4 + 4 * dimensions
    sizes = np.frombuffer(content[4:start], ">u4").astype(np.int64)
    if content[:4] != bytes((0, 0, _IDX_BYTES, dimensions)) or len(content) != start + sizes.prod():
        raise InvalidInputError(f"{path} is no IDX file of {dimensions} dimensions: get it from {_WHERE['mnist']}")
    values = np.frombuffer(content, np.uint8, offset=start)
    return torch.from_numpy(values.reshape(sizes.tolist()).copy())


def _content(path: Path, kind: str) -> bytes:
    """Return the content of a file, or if it is missing, of the compressed file with the suffix ``.gz``."""
    compressed = path.with_name(f"{path.name}.gz")
    try:
        return (
            path.read_bytes() if path.exists() or not compressed.exists() else gzip.decompress(compressed.read_bytes())
        )
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInputError(f"{path} cannot be read: {reason}; get it from {_WHERE[kind]}") from None


def _labels(labels: Tensor, path: Path) -> Tensor:
    if len(labels) == 0 or int(labels.max()) >= CLASSES:
        raise InvalidInputError(f"{path} has labels that are not from 0 to {CLASSES - 1}: get it anew")
    return labels.long()


_READERS: Mapping[str, Callable[[Path], Images]] = MappingProxyType({"cifar10": _cifar10, "mnist": _mnist})
_MADE: Mapping[str, Callable[[], Images]] = MappingProxyType({"digits": _digits, "cifar-shaped": _cifar_shaped})
