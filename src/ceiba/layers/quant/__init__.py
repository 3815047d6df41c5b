"""Quantization methods: how a matrix is stored on the device and multiplied. Formats of files end here."""
