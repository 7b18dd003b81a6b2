"""Tunes convolutions when they are first called, in any code of the process, and decides what runs until then.

No module is changed: wrappers around torch's own convolutions see the calls (``running/dispatcher.py``). ``tuning``
measures and chooses.
"""
