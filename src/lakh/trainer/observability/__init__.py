"""What a run reports: step metrics, events, network traffic, and sinks for TensorBoard and Prometheus."""
