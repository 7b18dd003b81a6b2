"""Timing: clocks, timers, interleaved comparisons, and the load that other processes put on the machine.

This folder times functions without arguments, and knows nothing of convolutions.
"""
