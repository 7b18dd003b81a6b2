"""Checks an algorithm against the contract that all of them keep, outside pytest too.

No measuring, no tuning and no algorithm lives here.
"""
