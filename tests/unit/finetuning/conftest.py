"""Runs of `lakh tune` start their ranks from one process, which imports torch once."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def one_fork_server(shared_fork_server) -> Iterator[None]:
    with shared_fork_server():
        yield
