"""Storage of measurements in a database file, robust against killed processes and moved files.

This folder neither measures nor chooses anything.
"""
