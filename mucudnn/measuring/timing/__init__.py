"""Takes times: clocks, timers, interleaved comparisons, and the load that other processes put on the machine.

This folder times calls without arguments, and knows nothing of convolutions.
"""
