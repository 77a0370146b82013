"""What crosses a process border says whose log-probs it holds: behaviour, proximal, reference, never just log-probs."""

import dataclasses
import inspect

from relax.protocol import messages, tensors

WHOSE = ("behaviour_logprobs", "proximal_logprobs", "reference_logprobs")
# Its name says it, and it holds nothing else.
SAID_BY_THE_MESSAGE = {("ReferenceLogprobs", "logprobs")}


def test_log_probs_that_travel_say_whose_they_are() -> None:
    seen = set()
    for module in (messages, tensors):
        for name, kind in inspect.getmembers(module, dataclasses.is_dataclass):
            for field in dataclasses.fields(kind):
                if "logp" in field.name or "log_p" in field.name:
                    seen.add(field.name)
                    assert field.name in WHOSE or (name, field.name) in SAID_BY_THE_MESSAGE, f"{name}.{field.name}"
                assert not field.name.startswith("old_"), f"{name}.{field.name}"
    assert {"behaviour_logprobs", "reference_logprobs"} <= seen
