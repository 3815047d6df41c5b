"""Configuration: typed frozen records, flags generated from them, and one pure function that resolves them.

Never imports torch; facts about the device and the model come in as values.
"""
