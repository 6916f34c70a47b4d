"""Measuring the network: links.py measures tiers, slow_hosts.py finds the slow hosts."""
