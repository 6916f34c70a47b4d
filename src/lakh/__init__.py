"""lakh: train code language models from one laptop to one lakh (100,000) GPUs, with one tool."""

__version__ = "0.1.0"
