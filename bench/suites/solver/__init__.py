"""Times the solvers on made-up measurements of known size.

No convolution is run here.
"""
