"""Engines elsewhere as one backend: gateway.py chooses among replicas (affinity.py), asks them (replica.py), and writes
the hole of a fill-in-the-middle prompt as text where a replica does not know it (fim_text.py). Lives without torch.
"""
