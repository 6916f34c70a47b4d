"""Synthetic code: programs that a model writes together with their tests, kept if the tests pass in the sandbox.

    prompts.py      what the model is asked: topics and kinds of programs
    programs.py     an answer as a program with tests; what the sandbox runs; a control that tests must fail
    run.py          ask, run, record, build the corpus; continues after a stop

Above evals, whose sandbox and clients it uses, and above corpus, which deduplicates and decontaminates the result.
"""

from lakh.synthesis.prompts import read_topics
from lakh.synthesis.run import SynthesisRequest, SynthesisResult, synthesize

__all__ = ["SynthesisRequest", "SynthesisResult", "read_topics", "synthesize"]
