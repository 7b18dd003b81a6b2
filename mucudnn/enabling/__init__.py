"""Tuning of all convolutions in a process as they are called, and choices of the configurations to run until then.

No module is changed: wrappers around torch's own convolutions intercept the calls (``running/dispatcher.py``).
``tuning`` measures and chooses.
"""
