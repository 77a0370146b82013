"""How long the samples of a simulated run become.

    constant:N           every sample has N tokens
    lognormal:MEAN,SIGMA mean length MEAN in tokens, SIGMA the standard deviation of the length's logarithm
    pareto:MIN,ALPHA     at least MIN tokens, P(length > n) = (MIN / n)^ALPHA: the heavy tail
    file:PATH            lengths of a recorded run, one whole number a line, drawn with equal chance

A length depends on the seed of its sample alone (relax/data/seeds.py), so runs that differ in nothing but their
schedule draw the same lengths: a quantile function, applied to a uniform number hashed from the seed.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist, fmean

import xxhash

FORMS = "constant:N, lognormal:MEAN,SIGMA, pareto:MIN,ALPHA or file:PATH"
# Beyond what any engine can sample; keeps a quantile of a tail without end a number that can be counted with.
LONGEST = 2**31 - 1
_STANDARD = NormalDist()


class ModelError(ValueError):
    """Text that describes no model of the simulation: `problem` says what is wrong with it, `fix` what to write."""

    def __init__(self, text: str, problem: str, fix: str) -> None:
        super().__init__(f"{text!r}: {problem}. {fix}")
        self.problem, self.fix = problem, fix


@dataclass(frozen=True, slots=True)
class LengthModel:
    """The length of a sample, in tokens, as a function of the sample's seed.

    `mean` is that of the distribution, before lengths are rounded and before a limit on the response cuts its tail.
    """

    text: str
    mean: float
    quantile: Callable[[float], float] = field(repr=False, compare=False)  # of a probability in (0, 1)

    @classmethod
    def parse(cls, text: str) -> "LengthModel":
        """Raises ModelError; reads the file of `file:PATH`."""
        kind, _, rest = text.partition(":")
        match kind:
            case "constant":
                (length,) = _numbers(text, rest, "N")
                if length != int(length):
                    raise ModelError(text, f"N is {rest.strip()!r}", "A length is a whole number of tokens.")
                return cls(text, length, lambda u: length)
            case "lognormal":
                mean, sigma = _numbers(text, rest, "MEAN", "SIGMA")
                mu = math.log(mean) - sigma**2 / 2
                return cls(text, mean, lambda u: math.exp(mu + sigma * _STANDARD.inv_cdf(u)))
            case "pareto":
                least, alpha = _numbers(text, rest, "MIN", "ALPHA")
                if alpha <= 1:
                    raise ModelError(
                        text, f"with ALPHA {alpha:g} the lengths have no mean", "Give an ALPHA above 1, e.g. 1.5."
                    )
                return cls(text, least * alpha / (alpha - 1), lambda u: least * (1 - u) ** (-1 / alpha))
            case "file":
                lengths = _read(text, Path(rest))
                return cls(text, fmean(lengths), lambda u: lengths[int(u * len(lengths))])
        raise ModelError(text, "is no length model", f"Write {FORMS}.")

    def draw(self, seed: int) -> int:
        """Tokens of the sample with this seed, at least 1."""
        # 52 bits: with one more the largest would be rounded to 1, which has no quantile.
        uniform = ((xxhash.xxh3_64_intdigest(f"length/{seed}".encode()) >> 12) + 0.5) / 2**52
        return max(1, round(min(self.quantile(uniform), LONGEST)))


def _numbers(text: str, rest: str, *names: str) -> list[float]:
    """The positive numbers after the colon."""
    form = f"{text.partition(':')[0]}:{','.join(names)}"
    parts = rest.split(",") if rest else []
    if len(parts) != len(names):
        problem = f"has {len(parts)} numbers after the colon"
        raise ModelError(text, problem, f"Write {form}.")
    numbers = []
    for name, part in zip(names, parts, strict=True):
        if not re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", part) or not 0 < float(part) <= LONGEST:
            raise ModelError(
                text, f"{name} is {part!r}", f"Write {form} with a number above 0 and at most {LONGEST} for {name}."
            )
        numbers.append(float(part))
    if names[0] != "MEAN" and numbers[0] < 1:
        raise ModelError(text, f"{names[0]} is {numbers[0]:g}", "A sample has at least one token.")
    return numbers


def _read(text: str, path: Path) -> list[int]:
    fix = "Name a text file with one whole number, 1 or more, a line."
    if not path.name:
        raise ModelError(text, "names no file", fix)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ModelError(text, f"{path} cannot be read: {reason}", fix) from None
    lengths = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if not re.fullmatch(r"\s*[0-9]{1,10}\s*", line) or not 1 <= int(line) <= LONGEST:
            raise ModelError(text, f"{path}, line {number} is {line.strip()[:40]!r}", fix)
        lengths.append(int(line))
    if not lengths:
        raise ModelError(text, f"{path} has no lengths", fix)
    return lengths
