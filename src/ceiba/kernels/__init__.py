"""Kernels: tensors in, tensors out, no engine types. ``cpu`` (C++), ``triton``, ``cuda``."""
