"""Convolution algorithms from the engines (kernels) of NVIDIA's library cuDNN 9, called through its backend API."""

PREFIX = "cudnn:"  # of the algorithms' names
