"""c3: collectives that know the topology.

So far this room holds the loader of the native core (`native.py`); the transports, schedules and the torch backend
grow from there. It knows no model, and the trainer reaches it through a torch.distributed backend name.
"""
