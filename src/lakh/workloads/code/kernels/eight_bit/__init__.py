"""Matrix products of a block with operands in 8 bits: a module for each kind of scales (tensorwise.py, rowwise.py,
blockwise.py), the Triton kernels that round their operands, and products of 8-bit integers (int8_product.py)."""
