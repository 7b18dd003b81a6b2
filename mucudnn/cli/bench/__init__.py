"""Holds the commands of ``mucudnn bench``, one file each.

What they run lives in the top folder ``bench``.
"""
