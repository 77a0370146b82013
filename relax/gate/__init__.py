"""The gate: which groups may be sampled and which batch may be trained, so that no sample is ever too stale."""

from relax.gate.gate import Gate
from relax.gate.verdicts import Batch, Blocked, GateError, Refusal, Wait

__all__ = ["Batch", "Blocked", "Gate", "GateError", "Refusal", "Wait"]
