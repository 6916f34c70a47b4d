"""c3 beside Gloo and MPI: collectives, an FSDP2 step, codecs, startup."""
