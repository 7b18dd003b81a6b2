"""Algorithms from the engines of cuDNN 9, driven through its backend API."""

PREFIX = "cudnn:"  # of the algorithms' names
