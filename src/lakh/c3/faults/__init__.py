"""Fault tolerance: membership after a loss, a resilient all-reduce, and the chaos test that checks both."""
