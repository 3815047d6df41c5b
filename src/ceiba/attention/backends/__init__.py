"""Implementations of attention's contract, one a file; ``attention.select`` knows them by name and imports on use."""
