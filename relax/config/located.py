"""YAML read so that every value knows its line: errors in a topology file name the place to mend."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from relax.config.violation import ConfigError, Violation

Where = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Located:
    """A parsed YAML document. `data` is plain Python; `lines` maps the path of each key or item to its line."""

    file: str
    data: Any
    lines: dict[Where, int] = field(default_factory=dict)

    def source(self, where: Where) -> str:
        """`topologies/local.yaml:12`; of the nearest enclosing key when `where` itself is not in the file."""
        for end in range(len(where), 0, -1):
            if where[:end] in self.lines:
                return f"{self.file}:{self.lines[where[:end]]}"
        return self.file


def read_yaml(path: Path) -> Located:
    """Reads a YAML file. Raises ConfigError when it is missing, no YAML, no mapping or holds one key twice."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        fix = f"Relative paths start at the working directory, {Path.cwd()}."
        raise ConfigError([_violation(path, f"cannot be read: {error.strerror}", fix)]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([_violation(path, f"is no UTF-8 text: {error.reason}", "Save it as UTF-8.")]) from None
    loader = yaml.SafeLoader(text)
    lines: dict[Where, int] = {}
    repeated: list[Violation] = []
    try:
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError([_violation(path, "holds no mapping", "See topologies/local.yaml for an example.")])
        for where, line, duplicate in _keys(loader, root, ()):
            if duplicate:
                problem = f"stands twice, on lines {lines[where]} and {line}"
                repeated.append(Violation(str(where[-1]), str(path), problem, "Keep one.", f"{path}:{line}"))
            lines[where] = line
        data = loader.construct_document(root)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" on line {mark.line + 1}" if mark else ""
        problem = f"is no YAML{place}: {getattr(error, 'problem', None) or error}"
        raise ConfigError([_violation(path, problem, "Mend the syntax there.")]) from None
    finally:
        loader.dispose()
    if repeated:
        raise ConfigError(repeated)
    return Located(str(path), data, lines)


def _keys(loader: yaml.SafeLoader, node: yaml.Node, where: Where) -> Iterator[tuple[Where, int, bool]]:
    """(path, line, whether the same key came before) of everything below `node`."""
    if isinstance(node, yaml.MappingNode):
        loader.flatten_mapping(node)
        seen = set()
        for key, value in node.value:
            name = loader.construct_object(key)
            yield (*where, name), key.start_mark.line + 1, name in seen
            seen.add(name)
            yield from _keys(loader, value, (*where, name))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*where, index), value.start_mark.line + 1, False
            yield from _keys(loader, value, (*where, index))


def _violation(path: Path, problem: str, fix: str) -> Violation:
    return Violation("topology file", str(path), problem, fix)
