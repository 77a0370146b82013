"""Starting, supervising and ending a run on one host."""
