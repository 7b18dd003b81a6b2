"""Tunes: measures what is not known, and chooses configurations.

Timers are in ``mucudnn/measuring``, the mathematics in ``solver``; ``optimizing`` puts the choices into models.
"""
