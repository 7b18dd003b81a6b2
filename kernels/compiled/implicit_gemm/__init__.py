"""Computes one matrix product over all taps and channels, read from packed windows."""
