"""Workloads: what lakh trains. Each has the same file names: model.py, data.py, loss.py, parallel.py."""
