"""The front: HTTP protocols, authentication, and the tokenizer manager that talks to the scheduler. No torch.

``front`` and what it uses (``request``, ``generation``, ``validate``) serve ``ceiba.Engine`` too and know no HTTP.
"""
