"""Which verifier a run uses, in a form that travels to the worker processes as JSON."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from relax.data.generated import parse_spec
from relax.data.sources import REASONING_GYM


@dataclass(frozen=True, slots=True)
class VerifierSpec:
    """`kind` is reasoning_gym, math, exact_match or custom; `path` is module:function of a custom one.

    `exact` pays 1 only where a reasoning-gym score is exactly 1. `configs` maps a reasoning-gym task to the settings
    its prompts were generated with, since some scorers depend on them.
    """

    kind: str
    path: str = ""
    exact: bool = False
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def function(self) -> str:
        """The name of the reward function, for messages."""
        return self.path or self.kind

    @classmethod
    def from_options(cls, options: Any) -> "VerifierSpec":
        """The verifier that `options` (relax.config.Options, already checked) select."""
        if options.custom_rm_path is not None:
            return cls("custom", path=options.custom_rm_path)
        if options.rm_type is None:
            raise ValueError("no reward is selected: set --rm-type or --custom-rm-path")
        configs = {}
        if options.rm_type == "reasoning_gym" and str(options.prompt_data).startswith(REASONING_GYM):
            generated = parse_spec(str(options.prompt_data))
            configs[generated.task] = generated.config
        return cls(options.rm_type, exact=options.rm_exact, configs=configs)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "VerifierSpec":
        return cls(**json.loads(text))
