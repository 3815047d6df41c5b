"""The grammar libraries, each in two halves: compiling (in the compiler process) and masks (where tokens are chosen).

Owns one module for each library, imported only where it is used.
"""
