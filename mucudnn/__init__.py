"""mucudnn: faster convolutions in the memory there is."""

__version__ = "0.1.0"
