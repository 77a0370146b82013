"""Flags, derived from the options: `--help` by section, and a parser that names every mistake at once."""

import argparse
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from pydantic.fields import FieldInfo

from relax.config.fields import accepts, extra, flag, is_switch
from relax.config.options import SECTIONS, Options
from relax.config.refusals import choices, nearest
from relax.config.violation import ConfigError, Violation

USE_STALENESS = "Set --max-staleness: 0 is lockstep, 1 or more is asynchronous."
USE_CONTEXT_PARALLEL = "Context parallelism has one size for all samples here: --context-parallel-size."
FOREIGN = {
    "--fully-async": USE_STALENESS,
    "--hybrid": USE_STALENESS,
    "--colocate": "Services never share a device in turns here. " + USE_STALENESS,
    "--use-dynamic-global-batch-size": "Batches have one size here. " + USE_STALENESS,
    "--dynamic-context-parallel": USE_CONTEXT_PARALLEL,
    "--hybrid-context-parallel": USE_CONTEXT_PARALLEL,
}
"""Flags of other engines that people bring along, and what to use here."""


@dataclass(frozen=True, slots=True)
class Given:
    """A command line taken apart: `options` by name as typed, `own` the command's own arguments, `suspects` the
    options that misspelt flags were probably meant for."""

    options: dict[str, Any]
    own: argparse.Namespace
    violations: list[Violation]
    suspects: frozenset[str]


class Parser(argparse.ArgumentParser):
    """An argument parser with all options of Relax. A command adds its own arguments to it."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog=prog, description=description, allow_abbrev=False, formatter_class=_Formatter, add_help=True
        )
        # argparse's own pattern takes -1e-3 for a flag.
        self._negative_number_matcher = re.compile(r"^-\.?\d")
        self.names: dict[str, FieldInfo] = {}
        for section in SECTIONS:
            group = self.add_argument_group(section.__doc__ or section.__name__)
            for name in section.__annotations__:
                if name != "model_config":
                    field = Options.model_fields[name]
                    self.names[name] = field
                    _add(group, name, field)

    def error(self, message: str) -> NoReturn:
        fix = f"See {self.prog} --help."
        raise ConfigError([Violation("command line", "", message, fix)])

    def known(self) -> list[str]:
        return [name for name in self._option_string_actions if name.startswith("--")]

    def takes_value(self, known: str) -> bool:
        return self._option_string_actions[known].nargs != 0

    def parse(self, argv: Sequence[str]) -> Given:
        """Takes a command line apart. Unknown flags come back as violations; raises ConfigError for what argparse
        itself refuses (a missing argument of the command)."""
        kept, violations, suspects = self._without_unknown(argv)
        own, options = argparse.Namespace(), {}
        try:
            parsed = vars(self.parse_args(kept))
        except ConfigError as refused:
            raise ConfigError([*violations, *refused.violations]) from None
        for name, value in parsed.items():
            if name in self.names:
                options[name] = value
            else:
                setattr(own, name, value)
        for name in [name for name, value in options.items() if value is _NO_VALUE]:
            del options[name]
            suspects.add(name)
            violations.append(Violation(flag(name), "", "needs a value", f"Write {flag(name)} VALUE.", "flag"))
        return Given(options, own, violations, frozenset(suspects))

    def _without_unknown(self, argv: Sequence[str]) -> tuple[list[str], list[Violation], set[str]]:
        kept: list[str] = []
        violations: list[Violation] = []
        suspects: set[str] = set()
        rest = list(argv)
        while rest:
            word = rest.pop(0)
            name = word.split("=", 1)[0]
            if not word.startswith("--") or word == "--" or name in self._option_string_actions:
                kept.append(word)
                continue
            typed = name.replace("_", "-")
            match = typed if typed in self._option_string_actions else nearest(name, self.known())
            value = word.split("=", 1)[1] if "=" in word else None
            takes = self.takes_value(match) if match else name not in FOREIGN
            if value is None and name not in FOREIGN and takes and rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            if name in FOREIGN:
                problem, fix = "is no option here", FOREIGN[name]
            else:
                problem = "is no option"
                fix = f"Did you mean {match}?" if match else f"See {self.prog} --help."
                suspects |= {match[2:].replace("-", "_")} if match else set()
            violations.append(Violation(name, "" if value is None else value, problem, fix, "flag"))
        return kept, violations, suspects


_NO_VALUE = object()


def _add(group: argparse._ArgumentGroup, name: str, field: FieldInfo) -> None:
    about = extra(field)
    text = (field.description or "").replace("%", "%%")
    if about.unavailable:
        text += " (not available yet)"
    elif about.required:
        text += " (required)"
    elif about.derived:
        text += f" (default: {about.derived})"
    elif field.default is not None and not is_switch(field):
        text += f" (default: {field.default})"
    elif field.default is True:
        text += " (default: on)"
    if is_switch(field):
        # `--no-disable-...` and `--no-no-...` would be riddles; such a switch can only be set.
        one_way = name.startswith(("no_", "disable_"))
        action = "store_true" if one_way else argparse.BooleanOptionalAction
        group.add_argument(flag(name), dest=name, action=action, default=argparse.SUPPRESS, help=text)
        return
    group.add_argument(
        flag(name),
        dest=name,
        nargs="?",
        const=about.bare or _NO_VALUE,
        default=argparse.SUPPRESS,
        metavar=about.metavar or _metavar(field),
        help=text,
    )


def _metavar(field: FieldInfo) -> str:
    if listed := choices(field):
        return "{" + ",".join(listed) + "}"
    for kind, word in ((int, "N"), (float, "X")):
        if accepts(field, kind):
            return word
    return "TEXT" if accepts(field, str) else "PATH"


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=44, width=min(120, shutil.get_terminal_size().columns))

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        # nargs="?" is how a missing value is noticed, not something a user may leave out.
        return (
            str(action.metavar or default_metavar)
            if action.nargs == "?"
            else super()._format_args(action, default_metavar)
        )

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return action.option_strings[0].replace("--", "--[no-]", 1)
        return super()._format_action_invocation(action)

    def _format_usage(self, *args: Any) -> str:
        return f"usage: {self._prog} [options]; every option may also stand under `options:` in the topology file\n\n"
