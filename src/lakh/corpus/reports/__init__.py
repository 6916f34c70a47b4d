"""What a corpus contains: report.py (the manifest), card.py (README.md), html_page.py, lookup.py (one document)."""
