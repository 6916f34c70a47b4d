"""Faults in training jobs: lost and returning replicas beside torchft, restores from memory beside S3, and a soak."""
