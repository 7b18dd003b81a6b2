"""Thresholds of the races, each with the measurement behind it; docs/decisions.md has more on those of the quick race.

Times are those of the whole mini-batch, as multiples of the fastest candidate's within the workspace limit, unless
something else is said.
"""

from __future__ import annotations

# The quick race. An algorithm that is slower than these gets no more samples.
HOPELESS = 1.6  # at its largest size, after a probe: neither noise nor another size makes up for that
HOPELESS_PART = 2.5  # on a small part of the mini-batch, whose calls have shares that are not divided: `direct` once
# took 1.2 s to lose against 16 ms
CLOSE = 1.15  # after a sample with a cold cache: a second one decides
SECOND = 1.1  # so close to the best algorithm, another one is measured at half the size too
HOPELESS_ARITHMETIC = 1.25  # by its arithmetic at full rate: one look in a busy moment said 87 GFLOP/s of 204, after
# which most 1x1 layers of ResNet-50 were never tried with `pointwise`
SMALL_PART = 4  # of the mini-batch one such part, or less, is small
CHECKED_PART = 8  # of the mini-batch one such part, or a little more, is compared with float64
MAPPED_BYTES = 32 * 2**20  # from here on glibc maps memory anew in each call, whatever it has learnt, and the system
# clears it, so that halves can be faster than the whole: its DEFAULT_MMAP_THRESHOLD_MAX

# Expectations from similar problems, in the quick race.
NEIGHBOURS = 3
REACH = 4.0  # doublings of channels and pixels, in sum, beyond which nothing can be learnt
# Number of neighbours -> multiple of the fastest in each of them from which on an algorithm is hopeless. One neighbour
# is not enough: one slow moment must not rule out an algorithm for all similar problems.
HOPELESS_IN_LIKE = {2: 1.6, 3: 1.35}
HOPELESS_ELSEWHERE = 4.0  # in each of as many near problems that differ in the operation alone

# The thorough race. Most that a larger micro-batch is faster, per sample, than the best smaller one of the same
# algorithm. The factor is smaller against times of an earlier run: what that passed over must not be measured later
# for mere noise.
OPTIMISM = 2.0
OPTIMISM_WHEN_STORED = 1.2
MARGIN = 1.1  # a lead below this may be noise, however steady the samples are
FIRST_MARGIN = 1.5  # after a single sample
