"""The devices that tests of tensors run on."""

import pytest
import torch

on_each_device = pytest.mark.parametrize(
    "device",
    [
        torch.device("cpu"),
        pytest.param(
            torch.device("cuda"),
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
        ),
    ],
    ids=str,
)
