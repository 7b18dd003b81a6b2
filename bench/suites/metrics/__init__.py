"""Measures operators one by one, as level 0 of Deep500 does: errors, gradients, repeatability, time, overhead.

What it measures is in a result folder; what is told of it is read from there. How well a whole network trains is
elsewhere.
"""
