"""Small geometries that are awkward in every way the algorithms care about."""

from __future__ import annotations

from mucudnn.words.problem import ConvProblem, Operation

# name: (arguments of ConvProblem, mini-batch, micro-batch); 3 into 7 and 2 into 3 leave a smaller last micro-batch
_GEOMETRIES: dict[str, tuple[dict[str, object], int, int]] = {
    "same-3x3": ({"c": 5, "h": 9, "w": 12, "k": 6, "r": 3, "s": 3, "padding": (1, 1)}, 7, 3),
    "valid-3x3": ({"c": 16, "h": 8, "w": 8, "k": 17, "r": 3, "s": 3}, 2, 2),
    "one-sample": ({"c": 3, "h": 7, "w": 11, "k": 4, "r": 3, "s": 3, "padding": (1, 1)}, 1, 1),
    "pointwise": ({"c": 7, "h": 5, "w": 6, "k": 9, "r": 1, "s": 1}, 3, 2),
    "pointwise-stride": ({"c": 4, "h": 7, "w": 7, "k": 5, "r": 1, "s": 1, "stride": (2, 2)}, 3, 2),
    "same-5x5": ({"c": 3, "h": 11, "w": 13, "k": 5, "r": 5, "s": 5, "padding": (2, 2)}, 3, 2),
    "asymmetric": ({"c": 4, "h": 12, "w": 5, "k": 3, "r": 1, "s": 5, "stride": (1, 2), "padding": (0, 3)}, 3, 2),
    "wide-padding": ({"c": 3, "h": 6, "w": 5, "k": 4, "r": 3, "s": 3, "padding": (4, 3)}, 3, 2),
    "stride": ({"c": 3, "h": 12, "w": 11, "k": 4, "r": 3, "s": 3, "stride": (2, 3), "padding": (1, 1)}, 3, 2),
    "square-stride": ({"c": 5, "h": 13, "w": 10, "k": 6, "r": 3, "s": 3, "stride": (2, 2), "padding": (1, 0)}, 3, 2),
    "dilation": ({"c": 3, "h": 12, "w": 11, "k": 4, "r": 3, "s": 3, "dilation": (2, 3), "padding": (2, 0)}, 3, 2),
    "groups": ({"c": 6, "h": 7, "w": 8, "k": 10, "r": 3, "s": 3, "padding": (1, 1), "groups": 2}, 3, 2),
    "depthwise": ({"c": 8, "h": 9, "w": 7, "k": 8, "r": 3, "s": 3, "padding": (1, 1), "groups": 8}, 3, 2),
    "one-channel": ({"c": 1, "h": 8, "w": 10, "k": 1, "r": 3, "s": 3, "padding": (1, 1)}, 3, 2),
    "whole-image": ({"c": 5, "h": 4, "w": 3, "k": 6, "r": 4, "s": 3}, 3, 2),
    "tiles": ({"c": 2, "h": 37, "w": 41, "k": 3, "r": 3, "s": 5, "padding": (1, 2)}, 3, 2),
}
GEOMETRIES = tuple(_GEOMETRIES)
ONE_OF_EACH_KIND = ("same-3x3", "pointwise", "groups", "stride")


def geometry(name: str, operation: Operation, **changes: object) -> tuple[ConvProblem, int, int]:
    """Return a problem of this name with its mini-batch and micro-batch sizes.

    changes: other arguments of ``ConvProblem``, such as ``dtype``.
    """
    arguments, batch_size, micro_batch_size = _GEOMETRIES[name]
    return ConvProblem(operation, **(arguments | changes)), batch_size, micro_batch_size  # type: ignore[arg-type]
