"""How long each policy loss takes on a million tokens, forward and backward, and M2PO's solver alone.

Three ways in turn: Relax's function, the formula written in torch as one would at first, and a plain Python loop. They
run interleaved in one process, so that a busy machine slows all three; what counts are the ratios. Results are compared
before anything is timed.

    .venv/bin/python benchmarks/losses.py [--rounds 9] [--rows 512] [--columns 2048]
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from relax.algorithms import losses
from relax.algorithms.m2po import solve_band
from relax.algorithms.tensors import clamped_ratio

Step = Callable[[], tuple[float, float]]
"""Computes and returns (sum of the loss, sum of squares of its gradient); for the solver (eps_low, eps_high)."""

BUDGET, FLOORS = 0.01, (0.0, 0.0)


class Tokens:
    """The same tokens for everyone, as tensors and as lists. Ratios leave the usual clip bounds in both directions."""

    def __init__(self, rows: int, columns: int) -> None:
        generator = torch.Generator().manual_seed(0)
        draw = lambda: torch.randn(rows, columns, generator=generator)  # noqa: E731
        self.logp = -draw().abs()
        self.old = self.logp + 0.2 * draw()
        self.A = draw()[:, :1].expand(rows, columns).contiguous()
        self.mask = torch.ones(rows, columns)
        self.lists = list(zip(*(x.tolist() for x in (self.logp, self.old, self.A)), strict=True))


def relax_loss(name: str, t: Tokens) -> Step:
    inputs = {"gspo": (t.old, t.A, t.mask), "rloo": (t.A,)}.get(name, (t.old, t.A))

    def step() -> tuple[float, float]:
        logp = t.logp.clone().requires_grad_()
        return _backward(getattr(losses, name)(logp, *inputs).loss, logp)

    return step


def torch_loss(name: str, t: Tokens) -> Step:
    def clip(ratio: Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
        return torch.max(-ratio * t.A, -torch.clamp(ratio, 1 - low, 1 + high) * t.A)

    def step() -> tuple[float, float]:
        logp = t.logp.clone().requires_grad_()
        ratio = torch.exp(logp - t.old)
        match name:
            case "ppo_clip":
                loss = clip(ratio)
            case "gspo":
                mean = ((logp - t.old) * t.mask).sum(1, keepdim=True) / t.mask.sum(1, keepdim=True)
                loss = clip(torch.exp(mean).expand_as(logp))
            case "cispo":
                loss = -torch.clamp(ratio, 0.8, 1.2).detach() * t.A * logp
            case "sapo":
                tau = torch.where(t.A > 0, 1.0, 1.05)
                loss = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * t.A
            case "m2po":
                low, high = torch_band(t)
                loss = clip(ratio, max(low, 0.3), max(high, 0.5))
            case _:
                loss = -t.A * logp
        return _backward(loss, logp)

    return step


def loop_loss(name: str, t: Tokens) -> Step:
    token = {"ppo_clip": _clip_token, "gspo": _clip_token, "cispo": _cispo_token, "sapo": _sapo_token}.get(name)

    def step() -> tuple[float, float]:
        low, high = 0.2, 0.2
        if name == "m2po":
            low, high = loop_band(t)
            low, high = max(low, 0.3), max(high, 0.5)
        total = squares = 0.0
        for logps, olds, As in t.lists:
            if name == "gspo":
                n, of_row = len(logps), 0.0
                mean = sum(now - old for now, old in zip(logps, olds, strict=True)) / n
                for a in As:
                    value, grad = _clip_token(mean, 0.0, a, low, high)
                    total, of_row = total + value, of_row + grad
                squares += n * (of_row / n) ** 2
                continue
            for now, old, a in zip(logps, olds, As, strict=True):
                if name == "rloo":
                    value, grad = -a * now, -a
                else:
                    value, grad = (token or _clip_token)(now, old, a, low, high)
                total += value
                squares += grad * grad
        return total, squares

    return step


def _clip_token(now: float, old: float, a: float, low: float, high: float) -> tuple[float, float]:
    ratio = math.exp(now - old)
    free, clipped = -ratio * a, -min(max(ratio, 1 - low), 1 + high) * a
    return (clipped, 0.0) if clipped > free else (free, free)


def _cispo_token(now: float, old: float, a: float, low: float, high: float) -> tuple[float, float]:
    weight = min(max(math.exp(now - old), 1 - low), 1 + high)
    return -weight * a * now, -weight * a


def _sapo_token(now: float, old: float, a: float, low: float, high: float) -> tuple[float, float]:
    ratio, tau = math.exp(now - old), 1.0 if a > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -4 / tau * gate * a, -4 * gate * (1 - gate) * ratio * a


def relax_band(t: Tokens) -> tuple[float, float]:
    log_ratio = t.logp.double() - t.old.double()
    band = solve_band(log_ratio, clamped_ratio(log_ratio), t.A.double(), BUDGET, *FLOORS)
    return float(band.eps_low), float(band.eps_high)


def torch_band(t: Tokens) -> tuple[float, float]:
    """Tensor operations, and a Python loop over the sorted tokens with one transfer each."""
    log_ratio = t.logp.double() - t.old.double()
    harmful = ((t.A > 0) & (log_ratio > 0)) | ((t.A < 0) & (log_ratio < 0))
    d2 = (log_ratio[harmful] ** 2).sort().values
    n = len(d2)
    if n == 0 or d2.mean() <= BUDGET:
        return 1.0, 99999.0
    prefix = torch.cumsum(d2, 0)
    for k in range(n):
        if d2[k].item() * (n - k - 1) + prefix[k].item() >= BUDGET * n:
            tau = math.sqrt(d2[k - 1].item()) if k else 0.0
            return 1 - math.exp(-tau), math.exp(tau) - 1
    return 1.0, 99999.0


def loop_band(t: Tokens) -> tuple[float, float]:
    d2 = []
    for logps, olds, As in t.lists:
        for now, old, a in zip(logps, olds, As, strict=True):
            if (a > 0 and now > old) or (a < 0 and now < old):
                d2.append((now - old) ** 2)
    n = len(d2)
    if n == 0 or sum(d2) / n <= BUDGET:
        return 1.0, 99999.0
    d2.sort()
    prefix = 0.0
    for k, d in enumerate(d2):
        prefix += d
        if d * (n - k - 1) + prefix >= BUDGET * n:
            tau = math.sqrt(d2[k - 1]) if k else 0.0
            return 1 - math.exp(-tau), math.exp(tau) - 1
    return 1.0, 99999.0


def _backward(loss: Tensor, logp: Tensor) -> tuple[float, float]:
    total = loss.sum()
    total.backward()
    assert logp.grad is not None
    return total.item(), float(logp.grad.square().sum())


def measure(ways: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            start = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--columns", type=int, default=2048)
    args = parser.parse_args()
    tokens = Tokens(args.rows, args.columns)
    cases: dict[str, dict[str, Step]] = {
        name: {"relax": relax_loss(name, tokens), "torch": torch_loss(name, tokens), "loop": loop_loss(name, tokens)}
        for name in ("ppo_clip", "gspo", "cispo", "sapo", "m2po", "rloo")
    }
    solvers = (("relax", relax_band), ("torch", torch_band), ("loop", loop_band))
    cases["m2po solver"] = {way: (lambda solve=solve: solve(tokens)) for way, solve in solvers}  # type: ignore[misc]
    print(f"{args.rows * args.columns} tokens, median of {args.rounds}, {torch.get_num_threads()} thread(s)")
    print("| loss | Relax, ms | torch / Relax | loop / Relax |\n|---|---|---|---|")
    for name, ways in cases.items():
        results = {way: step() for way, step in ways.items()}
        for way, result in results.items():
            torch.testing.assert_close(result, results["loop"], rtol=2e-3, atol=1e-6, msg=f"{name}: {way} {results}")
        seconds = measure(ways, args.rounds)
        ratio = {
            way: statistics.median(a / b for a, b in zip(seconds[way], seconds["relax"], strict=True)) for way in ways
        }
        own = 1000 * statistics.median(seconds["relax"])
        print(f"| {name} | {own:.0f} | {ratio['torch']:.2f} | {ratio['loop']:.0f} |", flush=True)


if __name__ == "__main__":
    main()
