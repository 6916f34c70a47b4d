"""Formats of other simulators: execution traces of MLCommons Chakra, networks of InfraGraph.

protobuf_wire    the bytes of a Protocol Buffers message
chakra_trace     one rank's execution trace
chakra_export    a planned step as traces
chakra_replay    the time of traces on a cluster
infragraph       a cluster's network as an InfraGraph, and back
"""
