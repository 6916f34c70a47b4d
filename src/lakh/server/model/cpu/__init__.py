"""The engine on CPUs: decoder.py (all layers in one native call), tracing.py (its graph, from the definition of the
block), graph.py (nodes and buffers), packed.py (weights as native code reads them), large_pages.py (their memory),
native.py (the compiled library)."""
