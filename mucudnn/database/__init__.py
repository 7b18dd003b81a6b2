"""Stores measurements and reads them back, whatever happens to processes and files meanwhile.

Nothing is measured or chosen here.
"""
