"""Reports of result folders: tables, pictures and one self-contained page, made only from the stored time samples.

The module ``measured`` computes every number; tables, pictures and templates only show the numbers.
"""
