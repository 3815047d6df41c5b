"""Where programs run: one module per kind of backend."""
