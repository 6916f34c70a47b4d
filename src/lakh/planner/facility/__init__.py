"""Data halls: power, cooling, floor space and cables."""
