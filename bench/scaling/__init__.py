"""Predicts data-parallel training from what one device measures, and shares a batch out to unlike devices.

How long an all-reduce takes, and how gradients are merged for it, is computed in ``solver``.
"""
