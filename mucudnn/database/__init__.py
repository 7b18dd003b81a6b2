"""Storage of measurements, robust against killed processes and moved files.

Nothing is measured or chosen here.
"""
