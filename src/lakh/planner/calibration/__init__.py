"""Calibration: published measurements, and the efficiencies fitted to them.

measured_points      rows of the CSV as models, execution plans, clusters and seconds per step
published_sources    what a source's rows leave unsaid, from data/published_sources.toml
fit                  the fit, and the calibration that ships with lakh
"""
