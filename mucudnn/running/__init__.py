"""Running configurations in place of torch's convolution: operators, executables, workspace.

A tuned model needs this folder, ``modules``, ``kernels`` and ``words``, and nothing else.
"""
