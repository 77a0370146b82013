"""What a resume goes on with, as data: the groups that are pending again, and where new ones begin."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RevivedGroup:
    """A group that is to be drawn again at `attempt`: the prompt at `position` of `epoch`."""

    group: int
    attempt: int
    prompt_id: int
    epoch: int
    position: int


@dataclass(frozen=True, slots=True)
class Revived:
    """`parent` is the lineage that is resumed, at the cut `cut`; `groups` are in group order. `last_group` is the
    highest id that was ever drawn (-1: none), `epoch` and `index` the position of the first prompt that never was."""

    parent: int
    cut: int
    groups: tuple[RevivedGroup, ...]
    last_group: int
    epoch: int
    index: int
