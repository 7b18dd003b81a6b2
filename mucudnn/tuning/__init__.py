"""Tuning: measures missing results and chooses configurations.

Timers are in ``mucudnn/measuring``, solvers in ``solver``; ``optimizing`` puts the choices into models.
"""
