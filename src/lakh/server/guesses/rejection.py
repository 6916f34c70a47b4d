"""Exact rejection sampling: guesses of a draft become draws of the model, with the model's own probabilities.

A guess g that was drawn from q is kept with probability min(1, p[g] / q[g]); the first one that is not kept is replaced
by a draw from what p has more of than q, max(p - q, 0), and the guesses after it are dropped. Whatever q is, the tokens
that come out are distributed as if each had been drawn from p: a good draft only makes more of them survive. The share
that survives is 1 minus the distance (total variation) of p and q.

Pure functions over probabilities; random numbers come in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

__all__ = ["draw", "keep_or_replace"]


def keep_or_replace(
    guesses: Sequence[int], q: Sequence[Tensor], p: Sequence[Tensor], uniform: Callable[[], float]
) -> list[int]:
    """The guesses that are kept, and one token more. q: probabilities of the draft at each guess; p: of the model at
    each guess and after the last one; `uniform` gives numbers from 0 up to 1.
    """
    for index, guess in enumerate(guesses):
        if uniform() * float(q[index][guess]) < float(p[index][guess]):
            continue
        left = (p[index] - q[index]).clamp_min(0)
        # Nothing left means that p and q are equal up to rounding: p itself is then the answer.
        return [*guesses[:index], draw(left if float(left.sum()) > 0 else p[index], uniform())]
    return [*guesses, draw(p[len(guesses)], uniform())]


def draw(weights: Tensor, number: float) -> int:
    """An index with a probability in proportion to its weight."""
    reached = weights.cumsum(dim=-1)
    place = int((reached <= number * reached[-1]).sum())
    return min(place, int(weights.nonzero()[-1]))
