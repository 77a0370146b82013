"""The key of a run: one secret in a directory of its own, the same on every host of the run.

Whoever holds the secret may take part in the run and read what passes between its hosts; nobody else can do either. So
the file is readable by its owner alone, and nobody else may put another one in its place.
"""

import os
import re
import stat
from pathlib import Path

from relax.config.violation import Violation

KEY_FILE = "relax.key"
_SECRET = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # Z85 of 32 bytes
_HEADER = "# The secret key of a Relax run. Whoever can read this can take part in the run.\n"


class KeyProblem(Exception):
    """Keys that cannot be made or used: `path` is what is wrong, `problem` why, `fix` what to change."""

    def __init__(self, path: Path, problem: str, fix: str) -> None:
        super().__init__(f"{path} {problem}. {fix}")
        self.path, self.problem, self.fix = path, problem, fix

    @property
    def violation(self) -> Violation:
        return Violation("--keys", str(self.path), self.problem, self.fix)


def write_secret(directory: Path, secret: str) -> Path:
    """Put a new secret (40 characters of Z85) into `directory`, which is made where it is missing (mode 0700).

    Returns the file. Raises KeyProblem, also when the directory holds a key already: a run may depend on that one.
    """
    file = directory / KEY_FILE
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_directory(directory)
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        what, problem = (file, "is there already") if file.exists() else (directory, "is no directory")
        raise KeyProblem(what, problem, "Name another directory, or remove it first.") from None
    except OSError as error:
        raise KeyProblem(directory, f"cannot hold a key: {error.strerror}", "Name another directory.") from None
    with os.fdopen(fd, "w") as opened:
        opened.write(f"{_HEADER}{secret}\n")
    return file


def read_secret(directory: Path) -> str:
    """The secret of `directory`. Raises KeyProblem when there is none, or others can read or replace it."""
    file = directory / KEY_FILE
    try:
        _check_directory(directory)
        # Checked through the descriptor that is read from, so that what is checked is what is used.
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        fix = "Make keys with `relax-launch --keygen DIR` on one host and copy DIR to the others."
        raise KeyProblem(file, "is not there" if missing else f"cannot be read: {error.strerror}", fix) from None
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise KeyProblem(file, "is no file", "Make keys with `relax-launch --keygen DIR`.")
        _check_owner(file, facts)
        if facts.st_mode & 0o077:
            raise KeyProblem(file, f"can be used by others (mode {_mode(facts)})", f"chmod 600 {file}")
        text = os.read(fd, 4096).decode("ascii", "replace")
    finally:
        os.close(fd)
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("# ")]
    if len(lines) != 1 or not _SECRET.fullmatch(lines[0]):
        raise KeyProblem(file, "holds no secret key", "Make keys with `relax-launch --keygen DIR`.")
    return lines[0]


def _check_directory(directory: Path) -> None:
    facts = directory.stat()
    if not stat.S_ISDIR(facts.st_mode):
        raise KeyProblem(directory, "is no directory", "Name the directory that holds the key.")
    _check_owner(directory, facts)
    if facts.st_mode & 0o022:
        problem = f"can be written by others (mode {_mode(facts)}), who could put their own key there"
        raise KeyProblem(directory, problem, f"chmod 700 {directory}")


def _check_owner(path: Path, facts: os.stat_result) -> None:
    if facts.st_uid not in (os.geteuid(), 0):
        problem = f"belongs to user {facts.st_uid}, not to user {os.geteuid()} who runs this"
        raise KeyProblem(path, problem, f"chown {os.geteuid()} {path}")


def _mode(facts: os.stat_result) -> str:
    return f"{stat.S_IMODE(facts.st_mode):o}"
