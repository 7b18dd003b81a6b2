"""Writes and reads result folders: the samples of a benchmark beside the environment in which they were measured.

It knows no benchmark: each says what its subjects are.
"""
