"""Measuring the network: links.py measures tiers, slow_hosts.py and slow_ranks.py find the outliers."""
