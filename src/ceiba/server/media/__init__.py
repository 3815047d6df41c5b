"""Images that a request names: from an address or inline bytes to pixels, with every step bounded.

A route takes them in this order, and refuses at the first step that fails: the part's form and its address
(``sources``, nothing is sent anywhere), whether the loaded model sees at all, the address that the name stands for at
the moment of connecting and the bytes (``fetch``), the pixels (``images``). No model here sees yet, so the routes stop
at the second step; the others are what the first model that does will use.
"""
