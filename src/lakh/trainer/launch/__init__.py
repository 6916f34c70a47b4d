"""Start the ranks of a run (launcher.py), be one of them (rank.py), and join their process group (world.py)."""
