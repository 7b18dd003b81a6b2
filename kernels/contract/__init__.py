"""The contract of algorithms, and the buffers, reference and allocation counts that all families use."""
