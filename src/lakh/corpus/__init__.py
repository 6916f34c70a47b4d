"""The corpus: raw code in, clean Parquet out, and a reason for every document that was left out.

To read the room: document.py (the vocabulary and what a stage is), sources.py (listings), licences.py (a
decision), parse.py (bytes to documents), dedup.py (one copy of each text), pipeline.py (the build), shards.py
(files), report.py (the manifest). Lives without torch; needs pyarrow.

    docs-00000.parquet ...   the kept documents
    dropped.parquet          id, repo, path, reason and detail of the others
    manifest.json            counts, settings, hashes; written last, and only its presence means complete
"""

from lakh.corpus.document import REASONS, Document
from lakh.corpus.parse import Filters
from lakh.corpus.pipeline import Settings, build
from lakh.corpus.report import Report, read_report
from lakh.corpus.shards import read_documents

__all__ = ["REASONS", "Document", "Filters", "Report", "Settings", "build", "read_documents", "read_report"]
