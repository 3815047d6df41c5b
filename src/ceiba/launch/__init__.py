"""Builds and wires everything: the process graph, supervision, health, signals, the offline engine, the commands.

The only package that knows all others; nothing imports it.
"""
