"""Tuning: measurement of candidates without stored results, and choice of configurations for convolutions.

Timers are in ``mucudnn/measuring``, solvers in ``solver``; ``optimizing`` makes models use the chosen configurations.
"""
