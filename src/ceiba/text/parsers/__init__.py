"""What a model wrote, told apart: content, reasoning and tool calls, from a stream of text pieces.

One design for all families: a format is a small generator over `source.Source` that asks for more text when it needs
it, so the answer cannot depend on how the text was cut into pieces, and the non-streaming answer is the events joined.
Use `registry` to get parsers by name and `output.OutputParser` to run them. Must never know HTTP, requests or tensors.
"""
