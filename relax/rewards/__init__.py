"""Reward functions, and the pool of killable processes that runs them. Imports no torch."""

from relax.rewards.checks import check
from relax.rewards.child import RewardPoolError
from relax.rewards.pool import RewardPool
from relax.rewards.score import Failure, FailureKind, Item, Score
from relax.rewards.spec import VerifierSpec

__all__ = ["Failure", "FailureKind", "Item", "RewardPool", "RewardPoolError", "Score", "VerifierSpec", "check"]
