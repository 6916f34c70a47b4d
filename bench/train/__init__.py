"""Training steps beside transformers, and where a step's time goes."""
