"""The tiny model of tests/multiproc, as a directory that `lakh serve` takes."""

from tests.multiproc.conftest import served_model

__all__ = ["served_model"]
