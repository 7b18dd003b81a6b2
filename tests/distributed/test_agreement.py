"""Whether all ranks chose alike, and what is said where they did not."""

from __future__ import annotations

import pytest

from mucudnn.distributed.fingerprint import digest, require_agreement
from mucudnn.words.errors import SharingError

CHOICES = {"conv1": {"configuration": "native 8", "limit": "64"}, "conv2": {"configuration": "gemm 8", "limit": "64"}}
OTHER = CHOICES | {"conv2": {"configuration": "native 8", "limit": "32"}}


def test_equal_choices_agree() -> None:
    require_agreement({0: CHOICES, 1: dict(CHOICES), 5: CHOICES})
    assert digest(CHOICES) == digest(dict(CHOICES))


@pytest.mark.parametrize(
    "other", [OTHER, {}, {"conv1": CHOICES["conv1"]}, CHOICES | {"conv3": {}}, dict(reversed(CHOICES.items()))]
)
def test_digests_tell_choices_apart(other: dict[str, dict[str, str]]) -> None:
    assert digest(CHOICES) != digest(other)


def test_the_convolution_is_named_with_ranks_and_what_differs_first() -> None:
    with pytest.raises(SharingError) as raised:
        require_agreement({0: CHOICES, 3: OTHER, 4: CHOICES})
    message = str(raised.value)
    assert "conv2: configuration is native 8 on rank 3, gemm 8 on ranks 0, 4" in message
    assert "conv1" not in message
    assert "limit" not in message


def test_what_one_rank_lacks_is_named() -> None:
    with pytest.raises(SharingError, match="conv2: configuration is gemm 8 on rank 0, nothing on rank 1"):
        require_agreement({0: CHOICES, 1: {"conv1": CHOICES["conv1"]}})


def test_many_differences_are_counted() -> None:
    one, other = ({f"conv{n}": {"configuration": name} for n in range(9)} for name in ("gemm 1", "native 1"))
    with pytest.raises(SharingError, match=r"conv4: .*; and 4 more; please"):
        require_agreement({0: one, 1: other})
