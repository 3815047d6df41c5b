"""Execution of plans on one rank: step inputs, the forward pass, sampling. Knows rows and arrays, never requests."""
