"""Inference engines behind one interface: `base` says what an engine does, each other module is one of them.

`base` imports no torch and no engine, so the rollout service can be read and tested without either.
"""
