"""Model file formats of other tools: the Hugging Face directory (hf.py, hf_config.py) and GGUF (gguf.py)."""
