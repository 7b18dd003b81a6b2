"""Takes times: clocks, timers and comparisons in turns, and what others take of the machine meanwhile.

It knows calls that take no arguments, and no convolution.
"""
