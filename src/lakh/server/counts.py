"""What an engine did since it was made: plain numbers that its parts add to and its reader reports."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Counts"]


@dataclass
class Counts:
    """What an engine did since it was made."""

    steps: int = 0
    prompt_tokens: int = 0
    """Of rows that were let in."""
    cached_tokens: int = 0
    """Of these, found in the cache."""
    computed_tokens: int = 0
    """That went through the network: prompts, drawn tokens and guesses; on a GPU also those of rows that had ended, and
    of steps that nobody read (flight.py)."""
    drawn_tokens: int = 0
    drafts: int = 0
    """Times that a row brought guesses to a step."""
    drafted_tokens: int = 0
    kept_tokens: int = 0
    preempted_rows: int = 0
    aborted_rows: int = 0
