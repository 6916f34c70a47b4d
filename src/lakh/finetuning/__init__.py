"""Fine-tuning of a model on a user's own code, or on questions with answers.

    examples.py   rows of a JSONL file to tokens, each marked as context or as answer
    data.py       files, repositories or a token set to training data and held-out documents
    tune.py       a run of the trainer between two measurements on the held-out documents

    preferences.py   rows with a chosen and a rejected answer to training data, and how a model prefers them
    dpo.py           a run of the trainer on such pairs between two measurements

The training itself is lakh.trainer: a run with `adapter.rank` above 0 trains low-rank adapters.
"""
