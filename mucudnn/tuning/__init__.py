"""Tuning: measures candidate algorithms that have no stored results, and chooses configurations for convolutions.

Timers are in ``mucudnn/measuring``, solvers in ``solver``; ``optimizing`` makes models use the chosen configurations.
"""
