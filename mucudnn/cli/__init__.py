"""The command line: one file for each command.

The commands of ``mucudnn bench`` are in ``bench``, what several share in ``shared``.
"""
