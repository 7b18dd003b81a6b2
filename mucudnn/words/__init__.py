"""Types that all folders share: problems, configs, results, units, errors.

Imports no other folder, and torch only inside functions.
"""
