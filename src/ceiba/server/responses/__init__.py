"""OpenAI's Responses API: /v1/responses and what may be stored of it."""
