"""Models on images that do not fit into memory, by windows of them."""
