"""Steps on a GPU as CUDA graphs: decode.py (one token per sequence) and prefill.py (any few tokens of any sequences)
run the same layers (layers.py) with Triton kernels (kernels.py, attention_kernels.py). A single sequence has
faster forms: single_sequence.py (matrix-vector kernels) and megakernel/ (one persistent kernel).
"""
