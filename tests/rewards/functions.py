"""Reward functions that behave well and badly."""

import os
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

NOT_A_FUNCTION = 3


def length(prompt, response, label, row):
    return len(response)


def told(prompt, response, label, row):
    """Does what the response says."""
    match response.split():
        case ["hang"]:
            time.sleep(600)
        case ["hang-with-child", path]:
            child = subprocess.Popen(["sleep", "600"])
            Path(path).write_text(str(child.pid))
            time.sleep(600)
        case ["raise"]:
            raise KeyError("no such thing")
        case ["exit"]:
            sys.exit(0)
        case ["die", code]:
            os._exit(int(code))
        case ["die-once", path]:
            if not Path(path).exists():
                Path(path).touch()
                os.kill(os.getpid(), 9)
            return 1.0
        case ["abstain"]:
            return None
        case ["nan"]:
            return float("nan")
        case ["inf"]:
            return -float("inf")
        case ["huge", digits]:
            return 10 ** int(digits)
        case ["huge-fraction"]:
            return Fraction(10**400, 3)
        case ["list"]:
            return [1.0]
        case ["text"]:
            return "1.0"
        case ["numpy"]:
            import numpy as np

            return np.float32(0.5)
        case ["bool"]:
            return True
        case ["print"]:
            print("hello from a reward function", flush=True)
            return 1
        case ["pid"]:
            return os.getpid()
        case ["echo"]:
            return float(f"{prompt}{label}{row['digit']}")
    return 0.25


async def asynchronous(prompt, response, label, row):
    return 1.0


def two_arguments(prompt, response):
    return 1.0
