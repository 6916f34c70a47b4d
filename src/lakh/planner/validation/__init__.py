"""Checks of the planner against published figures: error on measurements, cross-validation, audit of claims."""
