"""The engine on CPUs: decoder.py (all layers in one native call), packed.py (weights as native code reads them),
large_pages.py (their memory), native.py (the compiled library)."""
