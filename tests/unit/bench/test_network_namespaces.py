"""Namespaces of a killed process are removed by the next one; others are kept."""

from bench.comm.network_namespaces import find_stale


def test_only_namespaces_of_ended_processes_are_stale() -> None:
    names = ["lakh12h0", "lakh12sw", "lakh77h3", "lakh77sw", "lakhsw", "docker12", "mylakh12h0", "lakh12h0x"]
    assert find_stale(names, lambda process: process == 77) == ["lakh12h0", "lakh12sw"]
