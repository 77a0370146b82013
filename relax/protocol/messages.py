"""Every message of the pipeline. Above each class: who sends it to whom, and when.

A message is small and frozen. Tensors travel as a `Payload` (relax/protocol/tensors.py says what is in one); an array
that is a field itself travels raw, in the first frame when it is small, in one of its own otherwise. `tell` messages
are retried until acknowledged and may arrive after the truth moved on: whatever carries a `Lease` is accepted by
compare-and-set against the ledger, so a duplicate or a zombie is harmless. `ask` messages name their reply in the
comment. A reply and a tell overtake each other, so no fact is told in both: of two that differ, the older one could be
heard last.
"""

import numpy as np

from relax.names import file_name
from relax.protocol.codec import message
from relax.protocol.payload import Payload


@message
class Lease:
    """The right to work on one draw of one group. A result with an old fence is stale."""

    group: int
    attempt: int
    lineage: int
    fence: int


@message
class Member:
    """One live service process, as the registry knows it."""

    name: str
    role: str
    endpoint: str
    incarnation: str

    def __post_init__(self) -> None:
        for what in ("name", "role", "incarnation"):
            file_name(getattr(self, what), f"the {what} of a member")
        if not self.endpoint.startswith(("ipc://", "tcp://", "inproc://")):
            raise ValueError(f"a member's endpoint {self.endpoint[:80]!r} is none")


# --- membership ------------------------------------------------------------------------------------------------------


# stranger -> controller, from a host that knows the controller's endpoint alone. Reply: Welcome.
@message
class Hello:
    pass


# controller -> stranger, reply to Hello. `cut` is the batch that the lineage begins at.
@message
class Welcome:
    run_id: str
    lineage: int
    cut: int

    def __post_init__(self) -> None:
        file_name(self.run_id, "the run id")


# service -> controller, first thing after its mailbox is bound; asked again until the controller is there.
# Reply: Registered.
@message
class Register:
    member: Member
    node: str
    pid: int
    options: dict[str, str]  # resolved options as JSON values: a service started with others is refused


# controller -> service, reply to Register. Who the members are, itself among them, it is told like all others.
@message
class Registered:
    num_batches: int | None  # None while the end of the data is unknown


# controller -> every service, whenever the registry changes.
@message
class Members:
    members: tuple[Member, ...]


# service -> controller, every heartbeat interval. `counters` only grow: seconds waited by reason (`wait/...`), tokens
# generated, ... A run in which neither an activity nor a counter of work changes does not get on.
# `gauges` are as they were measured last: `rss_bytes`, the resident memory of the service and its children.
# Reply: HeartbeatReceived.
@message
class Heartbeat:
    name: str
    incarnation: str
    activity: str
    counters: dict[str, float]
    gauges: dict[str, float]


# controller -> service, reply to Heartbeat.
@message
class HeartbeatReceived:
    pass


# controller -> every service, once, when the run is over: the receiver closes and exits 0, or 1 when the run failed.
@message
class Shutdown:
    reason: str
    failed: bool


# --- groups ----------------------------------------------------------------------------------------------------------


@message
class GroupOrder:
    """One group to sample. `row` is the dataset's row as JSON; what a sample draws depends on (run seed, epoch,
    prompt_id, sample index, attempt) alone. `parked` holds what was sampled of it already, or says where that
    is: all of it, where only a stage behind was lost."""

    lease: Lease
    prompt_id: int
    epoch: int
    prompt_tokens: np.ndarray  # int32 [prompt tokens]
    row: bytes
    parked: Payload | None = None  # arrays of SampledGroup, unfinished samples among them


# controller -> rollout, when the gate lets groups be issued to this replica. In lockstep one message holds the whole
# share of a batch, and all of it is queued before the engine's first step.
@message
class Generate:
    orders: tuple[GroupOrder, ...]
    together: bool


# rollout -> controller, when every sample of the group has ended.
@message
class Sampled:
    lease: Lease
    oldest_version: int
    tokens: int  # response tokens of all samples
    payload: Payload  # where the tensors are until the group ends: a description, never the arrays
    reward: str  # incarnation of the reward service that is sent the group; empty while there is none


# rollout -> controller, when the replica will not finish a group it holds (it is told to leave). With `payload` the
# group is parked: the samples so far, to go on at any replica; without, it starts anew. The attempt stays.
# rollout | reward | advantages -> controller, without `payload`, when the tensors are gone from who produced them.
@message
class HandedBack:
    lease: Lease
    oldest_version: int | None  # None without tokens
    payload: Payload | None  # arrays of SampledGroup, always inline: the sender goes away


# rollout, reward -> controller, when the replica is told to leave the run: it gets no more groups, and hands back or
# finishes what it holds.
@message
class Leaving:
    name: str


# rollout -> reward, with Sampled.
@message
class Score:
    order: GroupOrder
    payload: Payload  # arrays of SampledGroup


# reward -> advantages, when every sample has its reward. `rewards` is float64 [samples], NaN where the reward function
# abstained (a function that returns NaN is an error and never gets here).
@message
class Scored:
    order: GroupOrder
    payload: Payload
    rewards: np.ndarray


# reward -> controller, with Scored.
@message
class RewardDone:
    lease: Lease
    advantages: str  # incarnation of the service that is sent the group


# advantages -> controller, when the group passed the filters and its tensors are here.
@message
class Ready:
    lease: Lease
    oldest_version: int
    tokens: int


# advantages -> controller: a filter does not want this group. It is dropped and counted, its slot goes to another
# prompt.
@message
class Filtered:
    lease: Lease
    reason: str


# rollout | reward | advantages -> controller: this draw cannot be used. The controller counts it and draws again with
# the next attempt, or sets the prompt aside.
@message
class Rejected:
    lease: Lease
    stage: str
    reason: str
    detail: str


# controller -> rollout, advantages, when draws ended (trained or dropped): their tensors may go, and samples that still
# run are cancelled. A later draw of the same group is not meant.
@message
class Release:
    leases: tuple[Lease, ...]


# anybody in the run -> service: which draws do you work on? Reply: Holdings.
@message
class Inventory:
    pass


# service -> who asked, reply to Inventory. A draw is named from its arrival until the next stage has acknowledged it;
# by advantages until it is released, by actor and critic until the controller has their `Trained`. So from the replica
# that got it to its end there is no moment at which nobody names it: ask in the order of the stages, and a draw that is
# open and that no answer names is lost.
@message
class Holdings:
    leases: tuple[Lease, ...]


# --- batches ---------------------------------------------------------------------------------------------------------


# controller -> advantages, at the commit of a batch; the members' staleness is fixed from here on. `commit` counts the
# commits of a run: a batch whose commit was taken back is committed again under another number.
@message
class Assemble:
    batch: int
    commit: int
    leases: tuple[Lease, ...]


# advantages -> controller, when the batch was sent on: the metrics it alone can see.
@message
class Assembled:
    batch: int
    metrics: dict[str, tuple[str, float, float]]


# advantages -> actor and, where there is one, critic: the same batch, in answer to Assemble.
@message
class TrainBatch:
    batch: int
    commit: int
    leases: tuple[Lease, ...]
    payload: Payload  # arrays of TrainTensors, which the trainer fetches as soon as it hears of them


# actor -> controller, when it begins batch b, all of which it has: the next batch may be committed.
@message
class Started:
    batch: int
    commit: int


# controller -> actor, critic, when advantages died and may not have handed over this batch. Reply: Withdrawn.
@message
class Withdraw:
    batch: int
    commit: int


# actor, critic -> controller, reply to Withdraw. `held`: the batch is here as a whole and will be trained, or is
# already. Otherwise it is forgotten, and refused should it still come under this commit.
@message
class Withdrawn:
    held: bool


# actor, critic -> controller, after the last optimizer step of batch b; when all have reported, v rises to b + 1.
@message
class Trained:
    batch: int
    metrics: dict[str, tuple[str, float, float]]


# --- weights ---------------------------------------------------------------------------------------------------------


# actor -> controller: all bytes of this version are stored; `manifest` is the JSON of a relax.weights Manifest.
@message
class Published:
    version: int
    manifest: bytes


# controller -> rollout: serve this version as soon as your running samples have ended, or are paused; a newer one
# replaces it.
# controller -> reference, where it is refreshed: take this version over if one of your intervals begins with it.
@message
class Announce:
    version: int
    manifest: bytes


# rollout -> controller: this version is loaded and every further token is sampled by it. `credit` is how many groups
# the replica takes at a time; `running` names the groups that went on through the update and may have older tokens.
@message
class Serving:
    version: int
    credit: int
    running: tuple[Lease, ...]

    def __post_init__(self) -> None:
        if self.credit < 1:
            raise ValueError(f"credit = {self.credit}: a replica takes at least one group at a time")


# a node's weight agent -> actor (or an agent that has the version), for each chunk its node lacks. Reply: Chunk.
@message
class FetchChunk:
    version: int
    digest: str


# actor or agent -> agent, reply to FetchChunk. `data` is uint8 [bytes of the chunk], empty when no stored version has
# that chunk.
@message
class Chunk:
    data: np.ndarray


# --- critic and reference --------------------------------------------------------------------------------------------


# advantages -> reference, for each group as it arrives, and again at assembly for groups that an older reference has
# scored. Answered by the first reference that is at `version` or later. Reply: ReferenceLogprobs.
@message
class ReferenceRequest:
    version: int
    payload: Payload  # arrays of Responses


# reference -> advantages, reply to ReferenceRequest. `version` of the policy that the reference is, 0 for --ref-load;
# `logprobs` is float32, one a response token.
@message
class ReferenceLogprobs:
    version: int
    logprobs: np.ndarray


# advantages -> critic, at the assembly of a batch. Answered at exactly this version of the critic, the one that every
# batch before it has made. Reply: Values.
@message
class ValuesRequest:
    batch: int
    payload: Payload  # arrays of Responses


# critic -> advantages, reply to ValuesRequest. `values` is float32, one a response token.
@message
class Values:
    values: np.ndarray


# --- checkpoints -----------------------------------------------------------------------------------------------------


# controller -> actor, critic and a refreshed reference, at a cut: write the state that was copied when the batch before
# `batch` was trained, to <checkpoints>/<directory>/<role>, a new directory. Without a directory: forget that copy.
# Reply: Saved.
@message
class Save:
    batch: int
    directory: str

    def __post_init__(self) -> None:
        if self.directory:
            file_name(self.directory, "the checkpoint directory")


# actor, critic or reference -> controller, reply to Save. `problem` says why the part was not written, or nothing.
@message
class Saved:
    batch: int
    problem: str


# --- the end ---------------------------------------------------------------------------------------------------------


# controller -> actor, after the last batch: publish what is not published yet and write the export.
# Reply: Finished.
@message
class Finish:
    pass


# actor -> controller, reply to Finish.
@message
class Finished:
    version: int
    export: str
