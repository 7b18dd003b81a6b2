"""The algorithms that compute one micro-batch of a convolution, one folder for each family of algorithms.

No module in this package imports the database or the solver, or measures time. ``registry`` lists all algorithms.
"""
