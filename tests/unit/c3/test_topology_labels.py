"""Labels of a rank's place from the environment."""

import os

import pytest

from lakh.c3.topology import labels_from_environment


def test_a_host_label_may_name_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAKH_C3_HOST", raising=False)
    monkeypatch.setenv("LAKH_C3_RACK", "r0")
    assert labels_from_environment("machine") == ("machine", "r0", "")
    monkeypatch.setenv("LAKH_C3_HOST", "host-{pid}")
    assert labels_from_environment("machine") == (f"host-{os.getpid()}", "r0", "")
