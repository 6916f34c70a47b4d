"""The corpus: raw code in, clean Parquet out, and a reason for every document that was left out.

To read the room: document.py (the vocabulary and what a stage is), sources/ (listings), parse.py (bytes to documents),
lex.py and normalise.py (what two copies have in common), minhash.py, near.py and components.py (near copies);
policy.py, licence_files.py, spdx.py (licences); secrets/, quality.py, decontaminate.py, order.py; plan.py (splits of
the listing), steps.py (the build as steps and exchanges), engines/ (who runs them), pipeline.py (from start to commit),
writer.py and shards.py (files), report.py (the manifest). Lives without torch; needs pyarrow and numba.

    docs-00000.parquet ...      the kept documents of one split
    dropped-00000.parquet ...   id, repo, path, reason and detail of the others
    manifest.json               counts, settings, hashes; written last, and only its presence means complete
"""

from lakh.corpus.document import REASONS, Document
from lakh.corpus.parsing.read_files import FileFilterSettings
from lakh.corpus.pipeline import Settings, build
from lakh.corpus.reports.report import CorpusReport, read_report
from lakh.corpus.shards import read_documents

__all__ = [
    "REASONS",
    "CorpusReport",
    "Document",
    "FileFilterSettings",
    "Settings",
    "build",
    "read_documents",
    "read_report",
]
