"""Corpus builds beside datatrove, accuracy of the filters, tokenizing speed."""
