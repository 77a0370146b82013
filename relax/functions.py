"""Functions of the user, named `module:function`: found, and seen to be callable, in one way. Imports no torch."""

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from typing import Any


class FunctionError(ValueError):
    """A path that leads to no usable function; the text says why."""


@cache
def load(path: str) -> Callable[..., Any]:
    """The function that `path` names. Raises FunctionError that says which of the two is not there, and why."""
    name, colon, attribute = path.partition(":")
    if not (colon and attribute.isidentifier() and all(part.isidentifier() for part in name.split("."))):
        raise FunctionError(f"{path!r} is not of the form module:function")
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise FunctionError(f"there is no module {error.name!r}") from error
        raise FunctionError(f"module {name!r} imports {error.name!r}, which is not there") from error
    except Exception as error:  # a user's module may do anything at import
        raise FunctionError(f"module {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, attribute, None)
    if function is None:
        near = get_close_matches(attribute, [known for known in vars(module) if not known.startswith("_")], n=1)
        hint = f", but {near[0]!r}" if near else ""
        raise FunctionError(f"module {name!r} has no function {attribute!r}{hint}")
    if not callable(function):
        raise FunctionError(f"{attribute!r} of module {name!r} is a {type(function).__name__}, not a function")
    return function


def load_usable(path: str, *places: str, **named: str) -> Callable[..., Any]:
    """The function, which can be called with arguments in these `places`, and with the `named` ones; both are given as
    they are shown. Raises FunctionError."""
    function = load(path)
    module, _, name = path.partition(":")
    if inspect.iscoroutinefunction(function):
        raise FunctionError(f"function {name!r} of module {module!r} is async; it must be a plain function")
    try:
        inspect.signature(function).bind(*places, **named)
    except TypeError as error:
        called = f"{name}({', '.join([*places, *(f'{argument}={shown}' for argument, shown in named.items())])})"
        raise FunctionError(f"function {name!r} of module {module!r} cannot be called as {called}: {error}") from None
    return function
