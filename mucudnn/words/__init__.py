"""Holds the words that all folders share: problems, configs, results, units, errors.

It imports no other folder, and no torch before it is asked.
"""
