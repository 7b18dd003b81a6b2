"""Proving foreign code: its first run on this machine happens in a process of its own, under checks of the heap.

This folder has the process, the code that runs in it, and its client. What to do with a proof is decided by the callers
that measure.
"""
