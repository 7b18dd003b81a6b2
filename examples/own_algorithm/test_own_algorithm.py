from own_algorithm import ALGORITHM

from mucudnn.testing import check_algorithm


def test_it_keeps_the_contract() -> None:
    assert check_algorithm(ALGORITHM) > 0
