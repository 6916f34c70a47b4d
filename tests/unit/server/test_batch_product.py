"""Tiles of the products of decode batches: they fit the GPU and use its SMs."""

from __future__ import annotations

import pytest
import torch

from lakh.server.model.gpu.batch.product import MAX_TOKENS, STEP, BatchProduct, Output, ProductTile, tile_for

H200_SMS, H200_SHARED_BYTES = 132, 227 * 1024
# Rows and columns of qkv, o, down, gate and up, head: 1.2B and SmolLM2-135M; and the smallest.
SHAPES = [(4096, 2048), (2048, 2048), (2048, 5504), (11008, 2048), (32064, 2048), (960, 576), (576, 1536), (64, 64)]


@pytest.mark.parametrize("output", list(Output))
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_a_tile_fits_shared_memory_and_splits_only_where_parts_are_added(
    rows: int, columns: int, output: Output
) -> None:
    tile = tile_for(rows, columns, output, H200_SMS)
    assert tile.shared_bytes(MAX_TOKENS) <= H200_SHARED_BYTES
    assert tile.stages >= 3  # a stage is refilled two steps after its product
    assert tile.splits == 1 or (output == Output.PARTS and columns // STEP >= 2 * tile.splits)
    assert tile.rows % (16 * tile.groups) == 0
    assert tile.blocks(rows) * tile.rows >= rows * tile.splits


def test_splits_give_every_sm_a_block() -> None:
    assert [tile_for(rows, columns, Output.PARTS, H200_SMS).blocks(rows) for rows, columns in SHAPES[:3]] == [128] * 3
    assert tile_for(11008, 2048, Output.SWIGLU, H200_SMS).blocks(11008) == 115
    assert tile_for(32064, 2048, Output.BF16, H200_SMS).blocks(32064) == 251


@pytest.mark.parametrize(("columns", "tokens", "splits"), [(100, 8, 1), (128, MAX_TOKENS + 1, 1), (128, 8, 2)])
def test_products_that_the_kernel_cannot_compute_are_refused(columns: int, tokens: int, splits: int) -> None:
    with pytest.raises(ValueError, match=rf"no product of {tokens} tokens with 64 x {columns}"):
        BatchProduct(64, columns, tokens, Output.BF16, ProductTile(64, 4, splits), torch.device("cpu"))
