"""The ledger: what became of every group, decided in memory and kept in SQLite."""

from relax.ledger.book import GroupBook
from relax.ledger.states import Accepted, Conservation, LedgerError, Stale, StaleReason, State
from relax.ledger.store import Ledger

__all__ = ["Accepted", "Conservation", "GroupBook", "Ledger", "LedgerError", "Stale", "StaleReason", "State"]
