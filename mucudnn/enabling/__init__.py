"""Tunes convolutions as they come, in whatever runs in the process: what was met, whether to tune it, what runs.

No module is touched: wrappers around torch's own convolutions see the calls (``running/dispatcher.py``). Measuring and
choosing are ``tuning``'s.
"""
