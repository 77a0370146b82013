"""How a life of the pipeline begins: with nothing, or with what the ledger of a checkpoint says."""

from relax.data import Position, PromptReader, PromptRules, PromptSource, PromptStream, PromptTokenizer
from relax.launch.rundir import RunDir
from relax.ledger.resume import reopen, resume, set_aside
from relax.ledger.revived import Revived
from relax.ledger.store import Ledger
from relax.services.control.draws import Draws, revived_draws
from relax.services.control.saving import LEDGER, LEDGER_FILE


def open_ledger(run: RunDir) -> tuple[Ledger, Revived | None]:
    """The ledger of this lineage, and what a resume goes on with; the ledger of the life before is kept beside it.

    Raises LedgerError when the ledger or its copy in the checkpoint is not what it must be.
    """
    if run.checkpoint is None:
        if run.lineage:  # nothing was saved before the run died: it begins anew
            set_aside(run.ledger, run.lineage)
        return Ledger(run.ledger, run_id=run.run_id, lineage=run.lineage), None
    copy = run.checkpoint / LEDGER / LEDGER_FILE
    revived = resume(copy, run.cut)
    reopen(copy, run.ledger, cut=run.cut, lineage=run.lineage)
    ledger = Ledger.reopened(run.ledger, run_id=run.run_id, lineage=run.lineage, first_batch=run.cut)
    return ledger, revived


def open_prompts(
    draws: Draws,
    revived: Revived | None,
    source: PromptSource,
    tokenizer: PromptTokenizer,
    rules: PromptRules,
    *,
    seed: int,
    num_epoch: int | None,
    ahead: int,
) -> PromptStream:
    """The stream from the first prompt that was never drawn; `draws` begin with what is revived. Takes as long as
    tokenizing the prompts of the revived groups; raises DataError when the data is not what it was."""
    if revived is None:
        again, next_group, at = [], 0, Position()
    else:
        # Before the stream's thread begins: both use the tokenizer.
        again = revived_draws(revived, PromptReader(source, tokenizer, rules, seed))
        next_group, at = revived.last_group + 1, Position(revived.epoch, revived.index)
    stream = PromptStream(source, tokenizer, rules, seed=seed, num_epoch=num_epoch, at=at, ahead=ahead)
    draws.begin(stream, again, next_group)
    return stream
