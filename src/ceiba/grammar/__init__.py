"""Structured output: which tokens may come next so that an answer has the shape that was asked for.

Owns the reading of constraints, their compilation in processes that can be killed, and the masks. It sees ids, bytes
and texts; it must never know requests, rows or tensors.
"""
