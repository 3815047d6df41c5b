"""Mixture-of-experts layers: a router and a set of gated MLPs. They know tensors and shards, never models."""
