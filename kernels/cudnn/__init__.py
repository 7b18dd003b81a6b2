"""Convolution algorithms that run the engines (kernels) of NVIDIA's library cuDNN 9, through its backend API."""
