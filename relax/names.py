"""The one check of names that come from elsewhere and may become part of a file name.

Whatever turns a name into a path calls this (the run directory, the places of a run on a host), and messages that carry
such names call it when they are read, so that a bad one is refused with its sender.
"""

import re

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def file_name(text: str, what: str) -> str:
    """`text`, when it can be a file's name and nothing else: no separator, no dot in front, at most 96 characters.

    Raises ValueError, naming `what` it is.
    """
    if not _NAME.fullmatch(text):
        raise ValueError(f"{what} {text[:80]!r} can be no file name: letters, digits, '.', '_' and '-' only")
    return text
