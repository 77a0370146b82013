"""What can be wrong with the reward of a run, found before a process of the run starts."""

import socket
import subprocess
from collections.abc import Mapping
from typing import Any

from relax.config.violation import Violation
from relax.data.errors import DataError
from relax.data.generated import task_names
from relax.data.sources import REASONING_GYM, open_source
from relax.rewards import wire
from relax.rewards.spec import VerifierSpec
from relax.rewards.verifiers import task_of

_IMPORT_SECONDS = 60.0
_ROWS = 1000


def check(options: Any, sources: Mapping[str, str] | None = None) -> list[Violation]:
    """Every reason why `options` (relax.config.Options) select no usable reward; empty when they do.

    `sources` says where an option was set (`flag`, `topologies/local.yaml:12`), for faults between two of them.
    A custom function is imported in a child process, so that what its module does at import stays out of this one.
    """
    kind, custom = options.rm_type, options.custom_rm_path
    if kind is None and custom is None:
        fix = "Set it to reasoning_gym, math or exact_match, or give --custom-rm-path module:function."
        return [Violation("--rm-type", None, "no reward is selected", fix)]
    if kind is not None and custom is not None:
        at = {name: f" (from {source})" for name, source in (sources or {}).items()}
        problem = f"--rm-type {kind}{at.get('rm_type', '')} is set too, and only one of them can score"
        fix = f"Drop --rm-type{at.get('rm_type', '')} or --custom-rm-path{at.get('custom_rm_path', '')}."
        return [Violation("--custom-rm-path", custom, problem, fix)]
    violations = []
    if options.rm_exact and kind != "reasoning_gym":
        problem = f"it has no effect on {f'--rm-type {kind}' if kind else 'a custom function'}"
        violations.append(Violation("--rm-exact", True, problem, "Drop it, or use --rm-type reasoning_gym."))
    if kind in ("math", "exact_match") and options.label_key is None:
        problem = f"--rm-type {kind} compares with a label, and no field is named"
        violations.append(Violation("--label-key", None, problem, "Name the field that holds the answer."))
    if kind == "reasoning_gym" and not str(options.prompt_data).startswith(REASONING_GYM):
        violations += _check_entries(str(options.prompt_data), options.seed)
    if custom is not None:
        violations += _check_custom(VerifierSpec("custom", path=custom))
    return violations


def _check_entries(path: str, seed: int) -> list[Violation]:
    """The first rows are entries of known tasks. A file that cannot be read is left to the check of the data."""
    try:
        source = open_source(path, seed=seed)
        rows = [source.row(i) for i in range(min(len(source), _ROWS))]
    except DataError:
        return []
    fix = "Use --prompt-data reasoning_gym:<task>, write whole entries into the file, or choose another --rm-type."
    for i, row in enumerate(rows):
        try:
            task = task_of(row)
        except ValueError as error:
            return [Violation("--rm-type", "reasoning_gym", f"{source.where(i)}: {error}", fix)]
        if task not in task_names():
            problem = f"{source.where(i)}: reasoning-gym has no task {task!r}"
            return [Violation("--rm-type", "reasoning_gym", problem, fix)]
    return []


def _check_custom(spec: VerifierSpec) -> list[Violation]:
    fix = (
        "Give module:function, importable from the directory the run is started in (or on PYTHONPATH), "
        "callable as f(prompt, response, label, row)."
    )
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            wire.command(theirs.fileno(), spec), pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL
        )
    with ours, ours.makefile("rb") as stream:
        ours.settimeout(_IMPORT_SECONDS)
        try:
            reply = wire.read(stream) or {"error": "its process ended during the import"}
        except TimeoutError:
            reply = {"error": f"not imported within {_IMPORT_SECONDS:.0f} s"}
        finally:
            process.kill()
            process.wait()
    if "error" not in reply:
        return []
    return [Violation("--custom-rm-path", spec.path, reply["error"].strip().splitlines()[-1], fix)]
