"""The interface of convolution algorithms, and the buffers, reference and allocation counts that all of them share."""
