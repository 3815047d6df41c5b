"""Text in and out of tokens: tokenizers, incremental detokenization, stop strings and chat templates.

Knows ids, bytes and characters; must never know HTTP, schedulers, tensors or where a model file lies.
"""
