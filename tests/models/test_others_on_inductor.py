"""Models that nobody wrote for this project, trained on the inductor executor and by eager PyTorch side by side.

`make thorough` installs the packages (the extra `others`); a model whose package is missing, or does not import beside this
PyTorch, is skipped. Gradients, buffers and parameters are compared over two steps, and each gradient has eager's layout.
All of it is in float64, where a difference is no rounding: norms of few elements lose most digits of float32.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import thunder_fn as tfn
from tests.executors.conftest import compile_folder  # noqa: F401

Tensor = torch.Tensor
Made = tuple[nn.Module, tuple[Any, ...]]


def needed(name: str) -> Any:
    """A module of another package."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return importlib.import_module(name)
    except Exception as error:  # noqa: BLE001  torchvision raises RuntimeError beside a PyTorch that it was not built for
        pytest.skip(f"{name} cannot be imported: {type(error).__name__}: {str(error).splitlines()[0]}")


def image(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def timm_resnet() -> Made:
    return needed("timm").create_model("test_resnet", num_classes=3), (image(2, 3, 32, 32),)


def timm_vit() -> Made:
    vit = needed("timm.models.vision_transformer").VisionTransformer
    return vit(img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=3), (image(2, 3, 8, 8),)


def timm_convnext() -> Made:
    return needed("timm").create_model("test_convnext", num_classes=3), (image(2, 3, 64, 64),)


def torchvision_densenet() -> Made:
    densenet = needed("torchvision.models").DenseNet
    return densenet(4, (2, 2), 8, num_classes=3), (image(2, 3, 32, 32),)


def torchvision_swin() -> Made:
    swin = needed("torchvision.models").SwinTransformer
    return swin([2, 2], 8, [2], [2], [2, 2], stochastic_depth_prob=0.0, num_classes=3), (image(2, 3, 8, 8),)


def diffusers_unet() -> Made:
    needed("diffusers")
    unet = needed("diffusers.models").UNet2DModel
    model = unet(
        sample_size=16,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        layers_per_block=1,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return Chosen(model, "sample"), (image(2, 3, 16, 16), torch.tensor([3, 7]))


def diffusers_autoencoder() -> Made:
    needed("diffusers")
    autoencoder = needed("diffusers.models").AutoencoderKL
    return Chosen(autoencoder(block_out_channels=(8,), norm_num_groups=4, layers_per_block=1), "sample"), (
        image(1, 3, 8, 8),
    )


def x_transformers() -> Made:
    library = needed("x_transformers")
    layers = library.Decoder(dim=16, depth=2, heads=2, rotary_pos_emb=True, use_rmsnorm=True, ff_glu=True)
    return library.TransformerWrapper(num_tokens=11, max_seq_len=8, attn_layers=layers), (
        torch.arange(12).view(2, 6) % 11,
    )


def graph() -> tuple[Tensor, Tensor]:
    return image(6, 5), torch.tensor([[0, 1, 2, 3, 4, 5, 1, 0], [1, 0, 3, 2, 5, 4, 4, 5]])


def geometric_gcn() -> Made:
    return needed("torch_geometric.nn").GCN(5, 8, 2, 3), graph()


def geometric_gat() -> Made:
    return needed("torch_geometric.nn").GAT(5, 8, 2, 3, heads=2), graph()


def geometric_pooled() -> Made:
    library = needed("torch_geometric.nn")

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sage, self.norm = library.SAGEConv(5, 8, aggr="mean"), library.GraphNorm(8)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            x, batch = self.norm(self.sage(x, edges)).relu(), torch.tensor([0, 0, 0, 1, 1, 1])
            return library.global_add_pool(x, batch, 2) + library.global_mean_pool(x, batch, 2)

    return Pooled(), graph()


def e3nn_product() -> Made:
    needed("e3nn").set_optimization_defaults(jit_script_fx=False)
    o3 = needed("e3nn.o3")

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = o3.FullyConnectedTensorProduct("4x0e+2x1o", "1x0e+1x1o", "3x0e+2x1o", compile_right=False)

        def forward(self, x: Tensor, where: Tensor) -> Tensor:
            return self.product(x, o3.spherical_harmonics("1x0e+1x1o", where, True))

    return Product(), (image(5, 10), image(5, 3))


def segmentation_unet() -> Made:
    unet = needed("segmentation_models_pytorch").Unet
    return unet("resnet18", encoder_depth=3, decoder_channels=(8, 8, 8), encoder_weights=None), (image(2, 3, 16, 16),)


def group_norms() -> Made:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.norm(self.first(x)).chunk(2, 1)
            return x + self.last(nn.functional.silu(a) * nn.functional.dropout(b, 0.5, self.training))

    layers = nn.Sequential(Gated(), Gated()).to(memory_format=torch.channels_last)
    return layers, (image(2, 4, 6, 6).contiguous(memory_format=torch.channels_last),)


def transposed_convolutions() -> Made:
    up = nn.ConvTranspose2d(8, 4, 4, stride=2, padding=1)
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), up, nn.Upsample(scale_factor=2)), (
        image(2, 3, 9, 9),
    )


class Chosen(nn.Module):
    """A model of which one result is the output."""

    def __init__(self, model: nn.Module, name: str | int) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, *args: Any) -> Tensor:
        result = self.model(*args)
        return result[self.name] if isinstance(self.name, int) else getattr(result, self.name)


def lstm() -> Made:
    return Chosen(nn.LSTM(4, 8, num_layers=2, batch_first=True, bidirectional=True), 0), (image(2, 5, 4),)


MODELS: tuple[Callable[[], Made], ...] = (
    *(timm_resnet, timm_vit, timm_convnext, torchvision_densenet, torchvision_swin, diffusers_unet),
    *(diffusers_autoencoder, x_transformers, geometric_gcn, geometric_gat, geometric_pooled, e3nn_product),
    *(segmentation_unet, group_norms, transposed_convolutions, lstm),
)


def near(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """All are as near as sums in another order are, with some numbers that models compute in float32."""
    assert found.keys() == wanted.keys()
    for name, right in wanted.items():
        scale = float(right.abs().max()) if right.is_floating_point() and right.numel() else 1.0
        torch.testing.assert_close(
            found[name], right, rtol=1e-5, atol=1e-6 * scale + 1e-9, msg=lambda m: f"{name}: {m}"
        )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_training_is_eagers(make: Callable[[], Made]) -> None:
    torch.manual_seed(0)
    model, args = make()
    model, args = model.double(), tuple(arg.double() if arg.is_floating_point() else arg for arg in args)
    twin = copy.deepcopy(model)
    jitted = tfn.jit(twin, executors=["inductor"])
    for step in range(2):
        gradients = list[dict[str, Tensor]]()
        for owner, run in ((model, model), (twin, jitted)):
            torch.manual_seed(step)
            owner.zero_grad()
            (run(*args) ** 2).mean().backward()
            gradients.append({name: p.grad for name, p in owner.named_parameters() if p.grad is not None})
        eager, ours = gradients
        near(ours, eager)
        strides = [{name: gradient.stride() for name, gradient in found.items()} for found in (ours, eager)]
        assert strides[0] == strides[1]
        with torch.no_grad():
            for owner, found in ((model, eager), (twin, ours)):
                for name, parameter in owner.named_parameters():
                    if name in found:
                        parameter -= 0.01 * found[name]
        near(dict(twin.state_dict()), dict(model.state_dict()))
