"""The seed of a sample: a function of what it answers, never of who answers or when."""

import xxhash


def sample_seed(seed: int, epoch: int, prompt_id: int, sample: int, attempt: int) -> int:
    """H(seed, epoch, prompt id, sample index, attempt) as a positive 63-bit int, equal on every machine."""
    text = f"{seed}/{epoch}/{prompt_id}/{sample}/{attempt}"
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1
