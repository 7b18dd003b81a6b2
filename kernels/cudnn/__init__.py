"""Drives cuDNN 9 through its backend API, and makes algorithms of its engines.

Nothing outside of this folder needs to know cuDNN.
"""

PREFIX = "cudnn:"  # of the names of its engines
