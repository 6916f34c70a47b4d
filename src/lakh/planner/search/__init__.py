"""Search over all execution plans of a model on a cluster."""
