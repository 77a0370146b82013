"""Who offended how often, in bounded memory, and when that is worth a line in the log."""

from collections.abc import Hashable


class Tally:
    """Counts for the `limit` most recently counted of any number of names."""

    def __init__(self, limit: int = 1024) -> None:
        self._limit = limit
        self._counts: dict[Hashable, int] = {}

    def add(self, who: Hashable) -> int:
        """Count one more and return how many there are now."""
        count = self._counts.pop(who, 0) + 1
        self._counts[who] = count
        if len(self._counts) > self._limit:
            del self._counts[next(iter(self._counts))]
        return count

    def __getitem__(self, who: Hashable) -> int:
        return self._counts.get(who, 0)

    def __len__(self) -> int:
        return len(self._counts)


def telling(count: int) -> bool:
    """Whether the `count`th event of a kind is told: ever more rarely, so that a flood of them is no flood of lines."""
    return count & (count - 1) == 0
