"""The planner beside Calculon."""
