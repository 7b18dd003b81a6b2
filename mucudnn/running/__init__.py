"""Runs configurations in place of torch's convolution: module, operators, recipes, workspace.

A tuned model needs this folder, ``kernels`` and ``words``, and nothing else.
"""
