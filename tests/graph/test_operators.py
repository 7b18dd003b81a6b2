"""Operators of graphs are values."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mucudnn.graph.operators.convolution import Convolution
from mucudnn.graph.operators.operator import Local, Operator, Ref
from mucudnn.graph.video.frames import FrameByFrame


def kinds_of(kind: type[Operator]) -> Iterator[type[Operator]]:
    yield kind
    for derived in kind.__subclasses__():
        yield from kinds_of(derived)


def test_nothing_is_written_to_an_operator() -> None:
    kinds = {*kinds_of(Operator)}
    assert {Convolution, FrameByFrame} < kinds
    for kind in kinds:
        assert vars(kind)["__dataclass_params__"].frozen, kind


def test_an_operator_with_other_indices_is_another_one() -> None:
    fields = {"name": "sum", "shape": (1, 2, 3, 4), "dtype": torch.float32}
    args = Ref(3), [Ref(5), 1.0]
    operator = Local(**fields, sources=(3,), wholes=(5,), target=torch.add, args=args, kwargs={"alpha": Ref(5)})
    renumbered = operator.renumbered({3: 1, 5: 2})
    assert (renumbered.sources, renumbered.wholes, renumbered.args) == ((1,), (2,), (Ref(1), [Ref(2), 1.0]))
    assert renumbered.kwargs == {"alpha": Ref(2)}
    assert (operator.sources, operator.wholes, operator.args) == ((3,), (5,), args)
    assert renumbered != operator.renumbered({3: 1, 5: 2}), "each is equal to itself only"
