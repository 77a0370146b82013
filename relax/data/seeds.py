"""The seed of a sample: a function of what it answers, never of who answers or when."""

import xxhash


def sample_seed(seed: int, epoch: int, prompt_id: int, sample: int, attempt: int, offset: int = 0) -> int:
    """H(seed, epoch, prompt id, sample index, attempt) as a positive 63-bit int, equal on every machine.

    A sample that goes on elsewhere after `offset` tokens has a seed of its own: with the old one, the new engine would
    draw the random numbers of the first tokens again.
    """
    text = f"{seed}/{epoch}/{prompt_id}/{sample}/{attempt}" + (f"/{offset}" if offset else "")
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1
