"""Pure functions that choose configurations (algorithms and micro-batch sizes) from measurements, without torch.

The packages numpy and PuLP are used.
"""
