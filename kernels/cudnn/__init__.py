"""cuDNN's convolution engines, driven one by one through the backend API of the libcudnn that torch has loaded."""
