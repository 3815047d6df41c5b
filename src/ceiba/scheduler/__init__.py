"""The brain: which request computes what in the next forward pass. Numpy and messages only; it never imports torch."""
