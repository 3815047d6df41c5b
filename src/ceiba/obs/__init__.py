"""Metrics and logs for all processes. Imports nothing of ours above core and config, and never fails a request."""
