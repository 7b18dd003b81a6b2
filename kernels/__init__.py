"""The algorithms that compute one micro-batch of a convolution, in a folder for each family.

No module in this package imports the database or the solver, or measures time. ``registry`` lists all algorithms.
"""
