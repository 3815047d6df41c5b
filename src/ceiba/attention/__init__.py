"""Attention over the paged KV pool: a plan/run contract, the backends behind it, and the choice among them."""
