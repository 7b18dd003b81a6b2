"""Proving foreign code: its first run on this machine happens in a process of its own, under checks of the heap.

Here are the process, what runs in it, and its client. What is done with a proof is decided by whoever measures.
"""
