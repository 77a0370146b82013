"""Options, topology and the checks made before a process starts. Imports no torch."""
