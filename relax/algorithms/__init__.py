"""Reward normalizers, advantages, policy losses, and the registry that names their combinations.

Importing this package, `registry` or `contracts` imports no torch, so a run can be validated anywhere; the modules that
compute are loaded when they are first used.
"""
