"""relax-launch with fake services, as a process of its own."""

import sys
from collections.abc import Sequence
from pathlib import Path

from relax.config.topology import Service
from relax.launch.cli import main
from relax.launch.plan import service_command


def command(service: Service, topology: Path, run_dir: Path, flags: Sequence[str]) -> list[str]:
    real = service_command(service, topology, run_dir, flags)
    return [sys.executable, str(Path(__file__).with_name("fake_service.py")), *real[3:]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], command))
