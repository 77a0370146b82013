"""Between the flat ragged layout that travels (sample after sample) and padded [N, T] arrays."""

from collections.abc import Iterator

import numpy as np

# Bounds the memory of padding a batch whose responses differ much in length: 2**22 float64 are 32 MiB.
_PADDED_TOKENS = 2**22


def pad(flat: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """flat [sum(lengths)] -> [N, max(lengths)], right-padded with 0, same dtype."""
    inside = _inside(lengths)
    padded = np.zeros(inside.shape, flat.dtype)
    padded[inside] = flat
    return padded


def unpad(padded: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[N, max(lengths)] -> flat [sum(lengths)]; the inverse of `pad`."""
    return padded[_inside(lengths)]


def blocks(lengths: np.ndarray) -> Iterator[slice]:
    """Consecutive slices of the samples, each of bounded size when padded; together they are all samples."""
    rows = max(1, _PADDED_TOKENS // max(1, int(lengths.max(initial=0))))
    for start in range(0, len(lengths), rows):
        yield slice(start, min(start + rows, len(lengths)))


def _inside(lengths: np.ndarray) -> np.ndarray:
    return np.arange(int(lengths.max(initial=0)))[None, :] < lengths[:, None]
