"""Holds the options and steps that several commands share.

No command lives here.
"""
