"""The trainer: owns the loop, the process group and the clock of a training run.

Read in this order: loop.py (the run), step.py (one update), state.py (what is saved and restored), readings.py (what a
step measured), event_writer.py (as events), evaluation.py, hooks.py, optim.py, spikes.py (does a step stand out), world.py
(the ranks), recovery.py (signals and faults), run_folder.py (one run at a time), launch.py (starting and restarting
ranks on one machine), torchrun.py, sinks.py (TensorBoard and Prometheus), goodput.py.
"""
