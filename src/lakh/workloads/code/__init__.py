"""The code language model.

architectures/  what a model is: parameters and the computation of a block, one file per family
ops.py          the operations that a block is made of; acceleration.py chooses fast ones
model.py        the trained network; data.py, batch.py, loss.py; attention.py
parallel.py     how it is distributed over ranks (parallelism/)
kernels/        fused kernels
formats/        Hugging Face and GGUF files
pretrained.py   small pretrained models by name, downloaded and checked
"""
