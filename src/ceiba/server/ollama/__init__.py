"""Ollama's protocol: /api/chat, /api/generate, /api/tags, /api/show, /api/ps, /api/version, /api/embed."""
