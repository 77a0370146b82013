"""Weights on their way from the trainer to the engines: manifests, the node's chunk store, its agent, publication.

Nothing here imports torch until a tensor is touched, so a process without a model can read manifests and tags.
"""
