"""Holds what all compiled algorithms share: tensors, checks, element types, register tiles; and a fingerprint."""
