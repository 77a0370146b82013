"""What a plan says of one setting, and which of several settings to take."""

from collections.abc import Sequence
from dataclasses import dataclass

from relax.planner.setting import Setting


@dataclass(frozen=True, slots=True)
class Prediction:
    """A run from its first issue to the end of its last batch. Idle times are shares of that time; `staleness` counts
    trained groups; `dropped` counts draws by reason."""

    setting: Setting
    seconds: float
    batches: int
    groups: int
    tokens: int
    trainer_idle: float
    slots_idle: float
    staleness: dict[int, int]
    dropped: dict[str, int]
    dropped_tokens: int
    dropped_samples: int
    issued: int
    events: int
    wall_seconds: float

    @property
    def groups_per_second(self) -> float:
        return self.groups / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def batch_seconds(self) -> float:
        return self.seconds / self.batches

    @property
    def mean_staleness(self) -> float:
        return sum(age * n for age, n in self.staleness.items()) / self.groups

    @property
    def max_staleness(self) -> int:
        return max(self.staleness)

    @property
    def generation_seconds(self) -> float:
        """Seconds a batch's tokens take when every slot is always busy."""
        return self.tokens / self.batches / self.setting.tokens_per_second

    @property
    def ideal_seconds(self) -> float:
        """Seconds a batch that no asynchrony can beat: the slower of generation and training."""
        return max(self.generation_seconds, self.setting.train_seconds)


def recommend(predictions: Sequence[Prediction], within: float) -> Prediction:
    """The least staleness, then the least lead, whose throughput is within a share of the best: age costs learning,
    so it is taken only where it buys speed."""
    best = max(p.groups_per_second for p in predictions)
    good = [p for p in predictions if p.groups_per_second >= (1 - within) * best]
    return min(good, key=lambda p: (p.setting.max_staleness, p.setting.lead))
