"""Reports of result folders: tables, pictures and one self-contained HTML page, made from the stored time samples.

The module ``measured`` computes every number; tables, pictures and templates only display the numbers.
"""
