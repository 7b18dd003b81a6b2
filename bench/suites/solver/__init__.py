"""Times the solvers on made-up networks of known size.

No convolution is run here.
"""
