"""The index of the KV cache: which token sequence lies in which slots. It knows slots, never tensors, and no torch."""
