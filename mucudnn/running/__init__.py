"""Execution of tuned configurations in place of torch's convolution: operators, executables, workspace.

A tuned model needs only this folder and ``modules``, ``kernels`` and ``words``.
"""
