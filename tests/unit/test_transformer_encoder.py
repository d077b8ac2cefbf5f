"""`nn.TransformerEncoder` in a trace: eager's numbers at padded places too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thunder_fn as tfn

MASKS = {
    "right": [[0, 0, 0, 0], [0, 0, 1, 1]],
    "left": [[1, 0, 0, 0], [0, 0, 0, 0]],
    "hole": [[0, 1, 0, 0], [0, 0, 0, 1]],
}


def encoder(*, norm: bool, mask_check: bool = True) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, nn.LayerNorm(8) if norm else None, mask_check=mask_check).eval()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("norm", (False, True))
def test_padded_places_are_eagers(norm: bool) -> None:
    model, x = encoder(norm=norm), torch.randn(2, 4, 8)
    with torch.no_grad():
        nn.init.normal_(model.norm.bias) if norm else None
        jitted = tfn.jit(model)
        for name, rows in MASKS.items():
            for mask in (torch.tensor(rows).bool(), torch.tensor(rows) * -1e9):
                expected, found = (run(x, src_key_padding_mask=mask) for run in (model, jitted))
                torch.testing.assert_close(found, expected, msg=name)
    assert tfn.cache_info(jitted).misses == 2, "whether the mask has a hole is data"


def test_padded_places_with_gradients() -> None:
    """Eager computes padded places if parameters require grad, or the first layer trains, and so does a trace."""
    model, x, mask = encoder(norm=False), torch.randn(2, 4, 8), torch.tensor(MASKS["right"]).bool()
    jitted = tfn.jit(model)
    assert torch.equal(jitted(x, src_key_padding_mask=mask), model(x, src_key_padding_mask=mask))
    assert jitted(x, src_key_padding_mask=mask)[1, 2:].abs().sum() > 0
    gradient = lambda g: g(lambda value: model(value, src_key_padding_mask=mask).square().sum())(x)
    torch.testing.assert_close(gradient(tfn.grad), gradient(torch.func.grad))


@pytest.mark.parametrize("training", (True, False))
def test_causal_masks_are_masks(training: bool) -> None:
    """Eager asks by its values whether a mask is the causal one; in a trace it may hold any others."""
    layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    decoder, x, memory = nn.TransformerDecoder(layer, 2).train(training), torch.randn(2, 4, 8), torch.randn(2, 3, 8)
    stack, causal = encoder(norm=True).train(training), nn.Transformer.generate_square_subsequent_mask(4)
    for run, name, args in ((decoder, "tgt_mask", (x, memory)), (stack, "mask", (x,))):
        jitted = tfn.jit(run)
        for mask in (causal, causal.flip(0), torch.zeros(4, 4)):
            torch.manual_seed(0)
            expected = run(*args, **{name: mask})
            torch.manual_seed(0)
            torch.testing.assert_close(jitted(*args, **{name: mask}), expected)
        assert tfn.cache_info(jitted).misses == 1
