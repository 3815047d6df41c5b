"""OpenAI's files and batches: /v1/files and /v1/batches, over one folder (--file-storage-path)."""
