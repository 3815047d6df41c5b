"""Triton kernels for CUDA devices: tensors in, tensors out. Owns tile shapes and launch grids; knows no engine types,
no model and no request. Importing a module here imports Triton, so callers on other devices must not.
"""
