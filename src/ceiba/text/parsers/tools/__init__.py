"""Tool-call formats: a few machines, and the declarations of the families that use them."""
