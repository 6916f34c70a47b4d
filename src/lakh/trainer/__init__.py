"""The trainer: owns the loop, the process group and the clock of a training run.

Read in this order: loop.py (the run), step.py (one update), optim.py, world.py (the ranks), recovery.py (signals and
faults), launch.py (starting and restarting ranks on one machine).
"""
