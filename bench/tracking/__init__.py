"""Tells what changed between result folders: of other versions, other machines, other days."""
