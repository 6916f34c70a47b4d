"""Namespaces of a process that was killed are the next one's to remove; nobody else's are."""

from lakh.c3.emulate import left_behind


def test_only_namespaces_of_gone_processes_are_left_behind() -> None:
    names = ["lakh12h0", "lakh12sw", "lakh77h3", "lakh77sw", "lakhsw", "docker12", "mylakh12h0", "lakh12h0x"]
    assert left_behind(names, lambda process: process == 77) == ["lakh12h0", "lakh12sw"]
