"""relax-launch --keygen DIR: the key that lets the hosts of a run talk to each other, and nobody else."""

import argparse
import sys
from pathlib import Path
from typing import Any

import zmq

from relax.config.keys import KeyProblem, write_secret


class Keygen(argparse.Action):
    """Makes the key, says what to do with it and exits: 0, or 2 when it could not be made."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        if not zmq.has("curve"):
            print("refused: this build of ZeroMQ has no CURVE; install the pyzmq wheel", file=sys.stderr)
            parser.exit(2)
        try:
            file = write_secret(Path(values), zmq.curve_keypair()[1].decode())
        except KeyProblem as problem:
            print(f"refused: {problem}", file=sys.stderr)
            parser.exit(2)
        print(f"key written to {file}")
        print(
            f"Copy the directory to every host of the run (scp -rp {file.parent} HOST:DIR), and give each --keys DIR."
        )
        print("Whoever can read it can take part in the run; a new key takes effect when the run is started anew.")
        parser.exit(0)
