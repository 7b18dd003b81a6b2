"""Pure functions that choose configurations (algorithms and micro-batch sizes) from measurements, without torch.

They use numpy and PuLP.
"""
