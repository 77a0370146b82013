"""The demo's task: spell a word of 3 to 5 letters backward (reasoning-gym `spell_backward`).

A prompt is `spice>`, its answer `ecips`. Words are split into training and held-out ones by a hash, because items
generated from nearby seeds overlap.
"""

import random
from collections.abc import Iterator
from typing import Any

import reasoning_gym

MAX_RESPONSE_TOKENS = 7  # five letters, the end-of-sequence token, and one to go wrong with
_LENGTHS = {"min_word_len": 3, "max_word_len": 5}
_HELD_OUT_SHARE = 0.1

Entry = dict[str, Any]


def entries(seed: int, *, held_out: bool) -> Iterator[Entry]:
    """Endless reasoning-gym entries of one side of the split, each with its `prompt`."""
    dataset = reasoning_gym.create_dataset("spell_backward", seed=seed, size=2**62, **_LENGTHS)
    index = 0
    while True:
        entry = dataset[index]
        index += 1
        if is_held_out(word_of(entry)) == held_out:
            yield {"prompt": f"{word_of(entry)}>", **entry}


def word_of(entry: Entry) -> str:
    return entry["metadata"]["word"].lower()


def is_held_out(word: str) -> bool:
    return random.Random(f"split:{word}").random() < _HELD_OUT_SHARE
