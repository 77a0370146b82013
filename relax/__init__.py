"""Relax: an asynchronous reinforcement-learning engine for language models."""
