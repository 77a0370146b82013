"""The model behind a service: on Megatron ranks (actor, critic, reference), or simulated (actor)."""
