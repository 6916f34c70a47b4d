"""`python -m lakh` is the command `lakh`; the launcher starts ranks this way."""

from lakh.cli import main

main()
