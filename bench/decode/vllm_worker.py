"""The program that `vllm_cpu` runs with the Python of an environment that has vLLM; imports nothing of lakh.

Arguments: model folder, dtype, JSON list of prompt ids. Reads a number of new tokens from each line of stdin, generates
as many after the prompt, and answers with one line of JSON. vLLM's own output goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main(folder: str, dtype: str, prompt: list[int]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import vllm  # type: ignore[import-not-found, unused-ignore]

    model = vllm.LLM(
        model=folder,
        dtype=dtype,
        max_model_len=max(2 * len(prompt), len(prompt) + 512),
        max_num_seqs=1,
        enforce_eager=True,  # torch.compile needs a compiler for each shape, and its start takes minutes
        enable_prefix_caching=False,
    )
    print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        count = int(line)
        sampling = vllm.SamplingParams(max_tokens=count, min_tokens=count, temperature=0, ignore_eos=True)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        (made,) = model.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        times = {"wall_s": time.perf_counter() - began_s, "cpu_s": time.process_time() - began_cpu_s}
        print(json.dumps(times | {"tokens": len(made.outputs[0].token_ids)}), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
