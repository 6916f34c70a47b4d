"""Wrong products are found: right ones are exact, and one wrong bit shows."""

import torch

from lakh.trainer.product_check import SIZES, count_wrong_products, read_products

CPU = torch.device("cpu")


def test_right_products_are_exact() -> None:
    done, wrong = count_wrong_products(CPU, 0.0)
    assert (done, wrong) == (1, 0)
    (reading,) = [reading for reading in read_products("n1", 0.001) if reading.device == "cpu"]
    assert (reading.metric, reading.value, reading.serial) == ("wrong_products", 0, "n1/cpu")


def test_one_wrong_element_is_found() -> None:
    found = 0
    for place in range(20):

        def multiply(left: torch.Tensor, right: torch.Tensor, place: int = place) -> torch.Tensor:
            product = left @ right
            product[place, 7 * place % SIZES["cpu"]] += 1
            return product

        found += count_wrong_products(CPU, 0.0, multiply=multiply)[1]
    assert found >= 19  # each is missed with probability 1/256, for a fixed seed
