"""Every option once, the topology file, and the checks made before a process starts. Imports no torch."""

from relax.config.options import Options
from relax.config.resolve import Resolved, load
from relax.config.violation import ConfigError, Violation

__all__ = ["ConfigError", "Options", "Resolved", "Violation", "load"]
