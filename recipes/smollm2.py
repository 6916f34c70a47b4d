"""Going on from SmolLM2-135M, a pretrained model that is small enough for a laptop.

`lakh models get smollm2` downloads it as a GGUF file, which this begins with. Tokens must be packed with its own
tokenizer: `lakh export smollm2.gguf --out smollm2-135m` writes a Hugging Face directory that contains it, and `lakh
tokens pack CORPUS --tokenizer smollm2-135m --out tokens-smollm2` uses it.
"""

from lakh.spec import Data, Model, Optimizer, Run, Training
from lakh.spec.cluster import load_cluster


def smollm2() -> Run:
    return Run(
        name="smollm2-more-code",
        init_from="smollm2.gguf",
        cluster=load_cluster("laptop"),
        model=Model(
            layers=30, width=576, heads=9, kv_heads=3, ffn=1536, vocab=49152, context=8192, rope_base=100_000.0
        ),
        data=Data(tokens="tokens-smollm2", sequence=512, batch=8, micro_batch=2),
        optim=Optimizer(lr=1e-4, warmup_steps=10),
        train=Training(steps=200, eval_every=50, eval_sequences=16),
    )
