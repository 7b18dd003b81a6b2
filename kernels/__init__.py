"""The algorithms that compute one micro-batch of a convolution, one folder for each family.

Nothing here imports the database or the solver, or measures time. ``registry`` lists all algorithms.
"""
