"""Interleaved timing of a table's convolutions: torch's, mucudnn's best undivided algorithm, and its configurations."""
