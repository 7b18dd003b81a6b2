"""The modules that replace torch's convolutions, and the conversion of torch's modules into them.

They compute with the folder ``running``; loading a pickled model needs both folders.
"""
