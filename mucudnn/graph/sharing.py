"""Memory that results of a model share with its arguments, its own tensors, and each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map


@dataclass(frozen=True, slots=True, eq=False)
class ResultMemory:
    """The memory of a result of the model.

    of: the number of an argument, or a tensor of the model, of which it is a view; None for new memory. block: a number
    that results share which are views of the same new memory; None for one that shares nothing. dtype, size, stride: of
    the result. offset: bytes behind the start of the argument, the tensor or the block.
    """

    of: int | Tensor | None
    block: int | None
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def on(self, base: Tensor) -> Tensor:
        """Return the view of a tensor: the tensor itself if it is all of it."""
        is_all = (self.size, self.stride, self.offset) == (tuple(base.shape), base.stride(), 0)
        if base.dtype == self.dtype:
            offset = base.storage_offset() + self.offset // base.itemsize
            return base if is_all else base.as_strided(self.size, self.stride, offset)
        made = torch.empty(0, dtype=self.dtype, device=base.device)
        offset = base.storage_offset() * base.itemsize + self.offset
        made.set_(base.untyped_storage(), offset // made.itemsize, self.size, self.stride)
        return made


def extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements of the memory from the first to the last element of a tensor.

    >>> extent((2, 3), (10, 1))
    13
    """
    if 0 in size:
        return 0
    return 1 + sum((count - 1) * step for count, step in zip(size, stride, strict=True))


def memories_of_results(model: nn.Module, arguments: tuple[Any, ...], own: Sequence[Tensor]) -> dict[int, ResultMemory]:
    """Return the memory of each result that is a tensor, by its number among the leaves of the output.

    own: the model's tensors. The model runs on tensors without values. Raises any error of the model, and
    ``ValueError`` for results that are negated or conjugated lazily.
    """
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def fake(value: Any) -> Any:
            return mode.from_tensor(value) if isinstance(value, Tensor) and not isinstance(value, FakeTensor) else value

        results = [fake(one) for one in tree_leaves(model(*tree_map(fake, arguments)))]
        known: list[tuple[int | Tensor, Any]] = [(one, fake(one)) for one in own]
        known += enumerate(map(fake, tree_leaves((arguments, {}))))
        bases = {_memory(one): (of, one) for of, one in known if isinstance(one, Tensor)}
        tensors = {number: one for number, one in enumerate(results) if isinstance(one, Tensor)}
        blocks = [_memory(one) for one in tensors.values()]
        found = {}
        for number, one in tensors.items():
            if one.is_neg() or one.is_conj():
                raise ValueError("a result is a view that is negated or conjugated lazily")
            memory, offset = _memory(one), int(one.storage_offset()) * one.itemsize
            of, base = bases.get(memory, (None, None))
            offset -= 0 if base is None else int(base.storage_offset()) * base.itemsize
            block = blocks.index(memory) if base is None and blocks.count(memory) > 1 else None
            found[number] = ResultMemory(of, block, one.dtype, tuple(one.shape), one.stride(), offset)
        return found


def unshared(
    results: Sequence[Any], memories: Mapping[int, ResultMemory], leaves: Sequence[Any], taken: set[int]
) -> list[Any]:
    """Return results that share memory exactly where the model's do.

    leaves: the arguments. taken: addresses of memory that no result may share, such as the graph's own.
    """
    taken |= {one.untyped_storage().data_ptr() for one in leaves if isinstance(one, Tensor)}
    blocks: dict[int, Tensor] = {}
    views: dict[tuple[object, ...], Tensor] = {}  # the same view is the same tensor
    found = []
    for number, value in enumerate(results):
        memory = memories.get(number)
        if memory is None:
            found.append(value)
            continue
        size, stride = memory.size, memory.stride
        if memory.of is None and memory.block is None:
            if value.untyped_storage().data_ptr() in taken:
                value = torch.empty_strided(size, stride, dtype=memory.dtype, device=value.device).copy_(value)
            taken.add(value.untyped_storage().data_ptr())
            found.append(value)
            continue
        key = id(memory.of), memory.block, memory.dtype, size, stride, memory.offset
        if key not in views and memory.block is not None:
            if memory.block not in blocks:
                of_block = [one for one in memories.values() if one.block == memory.block]
                ends = (one.offset + extent(one.size, one.stride) * one.dtype.itemsize for one in of_block)
                blocks[memory.block] = torch.empty(max(ends), dtype=torch.uint8, device=value.device)
            views[key] = memory.on(blocks[memory.block]).copy_(value)
        elif key not in views:
            base: Any = leaves[memory.of] if isinstance(memory.of, int) else memory.of
            views[key] = memory.on(base)
        found.append(views[key])
    return found


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
