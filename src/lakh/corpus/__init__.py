"""The corpus: raw code in, clean Parquet out, and a reason for every document that was dropped.

Start with document.py (schemas, filters) and pipeline.py (`build`). Then, in the order of a build:

    sources/        where raw code comes from              filters/   licence, opt-out, quality, decontamination
    build_plan.py   the listing, cut into splits           dedup/     exact and near duplicates, repository shares
    build_steps.py  the steps, the same for every engine   secrets/   secrets and personal data
    engines/        local processes, Beam, Spark           writer.py, shards.py   Parquet files
    parsing/        files to documents, tokens, features   reports/   the manifest, the card, look-ups
    licences/       SPDX expressions, files and texts

    docs-00000.parquet ...      the kept documents of one split
    dropped-00000.parquet ...   id, repo, path, reason and detail of the others
    manifest.json               counts, settings, hashes; written last, and only its presence means complete

Independent of torch; needs pyarrow and numba.
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
