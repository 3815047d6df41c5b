"""Reasoning formats: how each family sets its thinking apart from its answer."""
