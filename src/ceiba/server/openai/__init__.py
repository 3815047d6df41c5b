"""OpenAI's protocol: /v1/chat/completions, /v1/completions, /v1/models."""
