"""Tuning of all convolutions in a process at their first calls, and the choice of what runs until then.

No module is changed: wrappers around torch's own convolutions intercept the calls (``running/dispatcher.py``).
``tuning`` measures and chooses.
"""
