"""What may stand in a topology file: its keys, their types and defaults."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Index = Annotated[int, Field(ge=0, strict=True)]
Count = Annotated[int, Field(ge=1, strict=True)]


# It becomes a part of the run directory's name.
RUN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
LONGEST_RUN_NAME = 64


class Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RunEntry(Entry):
    name: str | None = Field(default=None, pattern=RUN_NAME, max_length=LONGEST_RUN_NAME)
    directory: Path = Path("runs")


class NodeEntry(Entry):
    address: str = Field(default="", description="host name or address other nodes reach this one by")


class ServiceEntry(Entry):
    node: str | None = None
    cores: list[Index] = Field([], description="cores of the service, dealt out evenly between replicas")
    devices: list[Index] = Field([], description="GPUs of the service, dealt out evenly between replicas")
    threads: Count = Field(1, description="OMP threads of each process")


class ReplicatedEntry(ServiceEntry):
    replicas: Count = 1


class RolloutEntry(ReplicatedEntry):
    engine: Literal["vllm", "simulated"] = "vllm"


class RankedEntry(ServiceEntry):
    """A service with a model. The actor's parallel sizes are options, and the others' where they name none."""

    ranks: Count | None = Field(None, description="processes of the model; the product of the parallel sizes otherwise")
    tensor_parallel_size: Count | None = None
    pipeline_parallel_size: Count | None = None
    context_parallel_size: Count | None = None
    expert_parallel_size: Count | None = None
    sequence_parallel: bool | None = None


class ActorEntry(RankedEntry):
    engine: Literal["megatron", "simulated"] = "megatron"


PARALLEL = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
    "sequence_parallel",
)
ROLES: dict[str, type[ServiceEntry]] = {
    "controller": ServiceEntry,
    "rollout": RolloutEntry,
    "reward": ReplicatedEntry,
    "advantages": ServiceEntry,
    "actor": ActorEntry,
    "critic": RankedEntry,
    "reference": RankedEntry,
}
RANKED = frozenset(role for role, entry in ROLES.items() if issubclass(entry, RankedEntry))
# Services that a run has several of: one of them may leave it.
REPLICATED = frozenset(role for role, entry in ROLES.items() if issubclass(entry, ReplicatedEntry))
# A service of these can be killed at any moment: the run goes on, and the launcher starts it again.
RESTARTED = frozenset({"rollout", "reward", "advantages", "reference"})
REQUIRED = ("controller", "rollout", "reward", "advantages", "actor")
TOP_LEVEL = ("run", "controller", "nodes", "services", "options")
ENDPOINT = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^\s:/]+):(\d{1,5})")
