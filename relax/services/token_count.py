"""How far an engine has got, told by its tokens: one sample may take longer than a sign of life should."""

from collections.abc import Mapping


class TokenCount:
    """How many tokens an engine has drawn, those of running samples as they come. `total` only grows."""

    def __init__(self) -> None:
        self.total = 0
        self._seen: dict[str, int] = {}  # running sample -> its tokens that are counted

    def sees(self, running: Mapping[str, int]) -> bool:
        """What the running samples have by now; whether that is more than was seen before."""
        before = self.total
        for sample, tokens in running.items():
            self._count(sample, tokens)
        return self.total > before

    def ended(self, sample: str, tokens: int = 0) -> None:
        """The sample runs no more and has so many tokens, or left with those that were seen."""
        self._count(sample, tokens)
        del self._seen[sample]

    def _count(self, sample: str, tokens: int) -> None:
        seen = self._seen.get(sample, 0)
        self.total += max(0, tokens - seen)
        self._seen[sample] = max(seen, tokens)
