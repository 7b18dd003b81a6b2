"""What ranks must have in common before they tune, and the errors that name differences."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mucudnn.core.errors import SharingError
from mucudnn.distributed import Fingerprint, kinds, require_alike

ONE = Fingerprint("cpu, a device", "host:file", {"torch": "2.13"}, {"threads": "2"}, ("conv1", "conv2"))
OTHER_KIND = replace(ONE, kind="cuda, another", in_kind={"threads": "1", "library": "cuDNN"}, convolutions=("conv1",))


def differences(fingerprints: list[Fingerprint]) -> list[str]:
    try:
        require_alike(fingerprints, "do this")
    except SharingError as error:
        return str(error).removeprefix("ranks that tune together must be alike: ").partition(". Start")[0].split("; ")
    return []


def test_kinds_need_the_same_in_themselves_and_settings_everywhere() -> None:
    assert differences([ONE, replace(ONE, place="elsewhere"), ONE]) == []
    require_alike([ONE], "")
    assert differences([ONE, OTHER_KIND, ONE]) == []
    assert kinds([ONE, OTHER_KIND, ONE]) == {ONE.kind: [0, 2], OTHER_KIND.kind: [1]}
    other = replace(OTHER_KIND, everywhere={"torch": "2.14"})
    assert differences([ONE, other]) == ["torch is 2.13 on rank 0, 2.14 on rank 1"]
    few_first = [ONE, ONE, replace(ONE, in_kind={"threads": "4"}), ONE]
    assert differences(few_first) == ["threads is 4 on rank 2, 2 on ranks 0, 1, 3"]


def test_every_difference_is_named() -> None:
    other = replace(ONE, everywhere={"torch": "2.14"}, in_kind={"threads": "4"})
    with pytest.raises(SharingError, match=r"torch is 2.13 on rank 0, 2.14 on rank 1; threads is .*; do this"):
        require_alike([ONE, other], "do this")


def test_convolutions_are_named_that_one_rank_has_alone() -> None:
    for convolutions, expected in (
        (("conv1", "conv3"), "the convolutions differ: 'conv2' on rank 0 only, 'conv3' on rank 2 only"),
        ((*ONE.convolutions, *"abcdefgh"), "the convolutions differ: 'a', 'b', 'c' and 5 more on rank 2 only"),
        (("conv2", "conv1"), "the convolutions come in another order on rank 2 than on rank 0"),
    ):
        assert differences([ONE, ONE, replace(ONE, convolutions=convolutions)]) == [expected]
    explained = replace(ONE, in_kind={"threads": "1"}, convolutions=())
    assert differences([ONE, explained]) == ["threads is 2 on rank 0, 1 on rank 1"]
