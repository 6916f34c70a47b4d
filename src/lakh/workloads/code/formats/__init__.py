"""Model file formats of other tools: the Hugging Face directory (hf/) and GGUF (gguf.py)."""
