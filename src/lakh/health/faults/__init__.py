"""Faults of a running job, injected from outside: processes, links, disks, files and object storage."""
