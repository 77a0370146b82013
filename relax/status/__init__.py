"""How a run stands: what its directory says, at any time and without its processes."""
