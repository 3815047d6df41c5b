"""Load generators and their reports. Speaks HTTP to any OpenAI-compatible server; imports nothing of the engine."""
