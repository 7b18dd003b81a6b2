"""Thresholds of the races, each with its reason; docs/decisions.md has more on the quick race.

Unless stated otherwise, thresholds are multiples of the whole mini-batch's time with the fastest candidate within the
workspace limit.
"""

from __future__ import annotations

# The quick race. An algorithm slower than these multiples gets no more samples.
HOPELESS = 1.6  # after a probe at its largest size: neither noise nor another size makes up for this
HOPELESS_PART = 2.5  # on a small part of the mini-batch, where fixed costs weigh more: probed on the whole, `direct`
# once took 1.2 s against 16 ms
HOPELESS_PROOF = 4.0  # in the proving process, where counting and guarding memory takes time too
LEAST_SLOW_PROOF_S = 0.02  # seconds; in shorter proofs that time may exceed the algorithm's own
CLOSE = 1.15  # after a sample with a cold cache: below it a second sample decides
SECOND = 1.1  # an algorithm this close to the best is measured at half the size too
HOPELESS_ARITHMETIC = 1.25  # by its FLOPs at peak rate, which load can hide: a probe that saw 87 of 204 GFLOP/s once
# ruled out `pointwise` for most 1x1 layers of ResNet-50
SMALL_PART = 4  # at most 1/4 of the mini-batch is a small part
CHECKED_PART = 8  # at least 1/8 of the mini-batch is compared with float64
MAPPED_BYTES = 32 * 2**20  # glibc's DEFAULT_MMAP_THRESHOLD_MAX: larger blocks are mapped and zeroed anew in each call,
# so that two halves can be faster than the whole

# Expectations from similar problems, in the quick race.
NEIGHBOURS = 3
REACH = 4.0  # limit on the distance: sum of the log2 ratios of channels and pixels
# Number of neighbours -> multiple of the fastest in each of them above which an algorithm is hopeless. One neighbour
# is not enough: a single disturbed measurement must not rule out an algorithm for all similar problems.
HOPELESS_IN_LIKE = {2: 1.6, 3: 1.35}
HOPELESS_ELSEWHERE = 4.0  # the same for neighbours with another operation

# In a thorough race, the assumed largest speedup, per sample, of a larger micro-batch over a smaller one.
OPTIMISM = 2.0
