"""Speculative decoding: who guesses the next tokens, and how a runner finds out which guesses were right."""
