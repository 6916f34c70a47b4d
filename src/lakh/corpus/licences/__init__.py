"""Licences: expressions.py (SPDX expressions), metadata.py (package metadata), detect.py (licence files and headers),
spdx_texts.py (licence texts)."""
