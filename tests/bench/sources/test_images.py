"""Images from files as they are published, written small."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from mucudnn.bench.sources.images import load_images
from mucudnn.words.errors import InvalidInputError

SIZES = {**{f"data_batch_{number}.bin": number for number in range(1, 6)}, "test_batch.bin": 4}


def write_cifar(folder: Path) -> dict[str, np.ndarray]:
    """Write CIFAR-10's binary version: a label, then a red, a green and a blue plane of 32x32 bytes."""
    source = np.random.default_rng(0)
    written = {}
    for name, count in SIZES.items():
        records = source.integers(0, 256, (count, 3073), dtype=np.uint8)
        records[:, 0] = source.integers(0, 10, count)
        (folder / name).write_bytes(records.tobytes())
        written[name] = records
    return written


def write_mnist(folder: Path) -> dict[str, np.ndarray]:
    """Write MNIST's IDX files, the tests compressed: magic number, sizes as big-endian integers, bytes."""
    source = np.random.default_rng(1)
    written = {}
    for part, count in (("train", 6), ("t10k", 3)):
        images = source.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = source.integers(0, 10, count, dtype=np.uint8)
        head = struct.pack(">BBBBIII", 0, 0, 8, 3, *images.shape), struct.pack(">BBBBI", 0, 0, 8, 1, count)
        for name, content in (
            (f"{part}-images-idx3-ubyte", head[0] + images.tobytes()),
            (f"{part}-labels-idx1-ubyte", head[1] + labels.tobytes()),
        ):
            if part == "t10k":
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / name).write_bytes(content)
        written[part] = images
        written[f"{part} labels"] = labels
    return written


def test_cifar_is_read_as_published(tmp_path: Path) -> None:
    written = write_cifar(tmp_path)
    found = load_images(f"cifar10:{tmp_path}")
    train = np.concatenate([written[name] for name in [*SIZES][:5]])
    images = torch.from_numpy(train[:, 1:].reshape(-1, 3, 32, 32).astype(np.float32))
    torch.testing.assert_close(found.train[0], (images - images.mean()) / images.std())
    assert found.train[1].tolist() == train[:, 0].tolist()
    assert found.test[1].tolist() == written["test_batch.bin"][:, 0].tolist()
    assert found.shape == (3, 32, 32)


def test_mnist_is_read_as_published_compressed_or_not(tmp_path: Path) -> None:
    written = write_mnist(tmp_path)
    found = load_images(f"mnist:{tmp_path}")
    train = torch.from_numpy(written["train"].astype(np.float32))
    test = torch.from_numpy(written["t10k"].astype(np.float32))
    for channel in range(3):
        torch.testing.assert_close(found.test[0][:, channel], (test - train.mean()) / train.std())
    assert found.train[1].tolist() == written["train labels"].tolist()
    assert found.test[1].tolist() == written["t10k labels"].tolist()


def test_images_that_are_made_are_the_same_every_time_and_learnable_halves() -> None:
    for name, shape in (("digits", (3, 8, 8)), ("cifar-shaped", (3, 32, 32))):
        found, again = load_images(name), load_images(name)
        assert found.shape == shape
        assert torch.equal(found.train[0], again.train[0])
        assert set(found.train[1].tolist()) == set(found.test[1].tolist()) == set(range(10))


def test_files_that_are_not_as_published_are_refused_with_the_place_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="'imagenet'; allowed are digits, cifar-shaped, cifar10:DIR, mnist:DIR"):
        load_images("imagenet")
    with pytest.raises(InvalidInputError, match=r"data_batch_1.bin cannot be read.*get it from https://www.cs.toronto"):
        load_images(f"cifar10:{tmp_path}")
    write_cifar(tmp_path)
    (tmp_path / "data_batch_3.bin").write_bytes(b"0" * 3000)
    with pytest.raises(InvalidInputError, match=r"data_batch_3\.bin is no file of CIFAR-10's binary version"):
        load_images(f"cifar10:{tmp_path}")
    (tmp_path / "data_batch_3.bin").write_bytes(b"\x0a" * 3073)
    with pytest.raises(InvalidInputError, match="labels that are not from 0 to 9"):
        load_images(f"cifar10:{tmp_path}")
    write_mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(struct.pack(">BBBBI", 0, 0, 8, 1, 5) + bytes(5))
    with pytest.raises(InvalidInputError, match="6 images and 5 labels"):
        load_images(f"mnist:{tmp_path}")
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"PNG")
    with pytest.raises(InvalidInputError, match="no IDX file of 3 dimensions"):
        load_images(f"mnist:{tmp_path}")
