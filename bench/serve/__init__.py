"""The server: overhead, time to first token, weight sync."""
