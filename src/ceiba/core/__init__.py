"""Types that every other package shares: requests, sampling, wire messages, the step contract, errors, limits.

Imports nothing of ours, and no torch: the front, the brain and the gateway start in a blink because of it.
"""
