"""Runs tuned configurations in place of torch's convolution: operators, executables, workspace.

A tuned model needs this folder and those of ``modules``, ``kernels`` and ``words``, and no other code of the project.
"""
