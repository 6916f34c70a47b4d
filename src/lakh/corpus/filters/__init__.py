"""Filters: functions that decide document by document, and the two lists of a build.

A filter is one file here with one function that takes its settings and returns a `document.Filter` (record batch to
record batch). Add it to one of the lists below: cheap filters run before deduplication, on every document; expensive
ones after it, on the documents that are left. docs/how-to/add-a-corpus-filter.md shows a complete example.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lakh.corpus.document import Filter
from lakh.corpus.filters.decontaminate import decontamination_filter
from lakh.corpus.filters.licence import licence_filter
from lakh.corpus.filters.opt_out import opt_out_filter
from lakh.corpus.filters.quality import quality_filter

if TYPE_CHECKING:
    from lakh.corpus.settings import Settings

__all__ = ["filters_after_dedup", "filters_before_dedup"]


def filters_before_dedup(settings: Settings) -> list[Filter]:
    return [
        licence_filter(settings.licences),
        opt_out_filter(settings.licences.opt_out),
    ]


def filters_after_dedup(settings: Settings) -> list[Filter]:
    return [
        quality_filter(settings.quality),
        decontamination_filter(settings.decontaminate),
    ]
