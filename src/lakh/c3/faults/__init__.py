"""Fault tolerance: membership after a loss, and a resilient all-reduce."""
