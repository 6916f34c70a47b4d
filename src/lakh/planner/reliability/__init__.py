"""Failures and goodput: published failure rates, and the share of time that remains useful."""
