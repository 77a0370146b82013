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
    """Reads a YAML file. Raises ConfigError when it is missing, no YAML, no mapping, holds one key twice, a key that is
    no single value, or itself (by an alias)."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        fix = f"Relative paths start at the working directory, {Path.cwd()}."
        raise ConfigError([_violation(path, f"cannot be read: {error.strerror}", fix)]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([_violation(path, f"is no UTF-8 text: {error.reason}", "Save it as UTF-8.")]) from None
    lines: dict[Where, int] = {}
    repeated: list[Violation] = []
    try:
        loader = yaml.SafeLoader(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = f"is no YAML on line {line}: it holds the character {chr(error.character)!r}"
        raise ConfigError([_violation(path, problem, "Remove it; is this a text file?")]) from None
    try:
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError([_violation(path, "holds no mapping", "See topologies/local.yaml for an example.")])
        for where, line, duplicate in _keys(loader, root, (), ()):
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
    except RecursionError:
        problem = f"is nested too deeply by line {loader.line + 1}"
        raise ConfigError([_violation(path, problem, "See topologies/local.yaml for an example.")]) from None
    finally:
        loader.dispose()
    if repeated:
        raise ConfigError(repeated)
    return Located(str(path), data, lines)


def _keys(
    loader: yaml.SafeLoader, node: yaml.Node, where: Where, above: tuple[yaml.Node, ...]
) -> Iterator[tuple[Where, int, bool]]:
    """(path, line, whether the same key came before) of everything below `node`, which lies within `above`."""
    if any(node is outer for outer in above):
        raise _error("an alias stands inside what it is an alias of", node)
    above = (*above, node)
    if isinstance(node, yaml.MappingNode):
        if any(value is node for _, value in node.value):
            raise _error("an alias stands inside what it is an alias of", node)
        loader.flatten_mapping(node)
        seen = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _error("a key is a list or a mapping, and must be a single value", key)
            name = _scalar(loader, key)
            yield (*where, name), key.start_mark.line + 1, name in seen
            seen.add(name)
            yield from _keys(loader, value, (*where, name), above)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*where, index), value.start_mark.line + 1, False
            yield from _keys(loader, value, (*where, index), above)
    elif isinstance(node, yaml.ScalarNode):
        _scalar(loader, node)


def _scalar(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    """The value of a scalar. yaml lets what int(), float() and date() say of `2024-13-45` or `!!int x` through bare."""
    try:
        return loader.construct_object(node)
    except (ValueError, LookupError, AttributeError, TypeError, OverflowError):
        raise _error(f"{node.value[:80]!r} is no {node.tag.rpartition(':')[2]}", node) from None


def _error(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _violation(path: Path, problem: str, fix: str) -> Violation:
    return Violation("topology file", str(path), problem, fix)
