"""The networks: small ones that train on one core in seconds, and the paper's ResNet34.

The ResNets are those of He, Zhang, Ren and Sun (2016), table 1, written from the paper. Names of
parameters follow torchvision's, so that weights can be exchanged.
"""

from collections import OrderedDict
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Conv3x3(nn.Conv2d):
    """A 3x3 convolution with padding 1; on images of 1x1 and 2x2 it is a matrix product.

    Most of the nine taps see nothing but padding there, and on a CPU torch multiplies with all
    those zeros: the last half of a ResNet on images of 32x32 is three times as fast without.
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, 3, stride, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        count, _, height, width = x.shape
        if height != width or height > 2 or x.device.type != "cpu":
            return super().forward(x)
        if height == 1:
            return F.linear(x.flatten(1), self.weight[:, :, 1, 1]).view(count, -1, 1, 1)
        stride = self.stride[0]
        size = -(-height // stride)
        # An output at i sees the inputs 0, ..., height - 1 through the taps 1 - i, ..., height - i.
        seen = [[1 - i * stride + k for k in range(height)] for i in range(size)]
        taps = [3 * a + b for rows in seen for columns in seen for a in rows for b in columns]
        # Whole channels are moved, never single taps: these lie nine apart in memory.
        weight = self.weight.flatten(2).permute(2, 0, 1).contiguous()
        weight = weight.index_select(0, torch.tensor(taps))
        weight = weight.unflatten(0, (size * size, -1)).transpose(1, 2).flatten(2).flatten(0, 1)
        found = F.linear(x.flatten(2).transpose(1, 2).flatten(1), weight)
        return found.view(count, size * size, -1).transpose(1, 2).reshape(count, -1, size, size)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (figure 2), option B where shapes change."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = Conv3x3(inputs, outputs, stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = Conv3x3(outputs, outputs)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        z: Tensor = self.relu(self.bn2(self.conv2(y)) + shortcut)
        return z


def resnet34(classes: int = 10) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(3, 64, 7, 2, padding=3, bias=False),
        bn1=nn.BatchNorm2d(64),
        relu=nn.ReLU(),
        maxpool=nn.MaxPool2d(3, 2, padding=1),
    )
    inputs = 64
    for i, count in enumerate((3, 4, 6, 3)):
        outputs = 64 * 2**i
        first = BasicBlock(inputs, outputs, stride=1 if i == 0 else 2)
        others = [BasicBlock(outputs, outputs, stride=1) for _ in range(count - 1)]
        layers[f"layer{i + 1}"] = nn.Sequential(first, *others)
        inputs = outputs
    layers["avgpool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["fc"] = nn.Linear(inputs, classes)
    model = nn.Sequential(layers)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def perceptron(*sizes: int) -> nn.Sequential:
    """Linear layers of these widths, with ReLU between them."""
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), *perceptron(64, 64, 64, 10))


def autoencoder() -> nn.Module:
    """Returns logits of pixels."""
    return nn.Sequential(nn.Flatten(), *perceptron(784, 128, 32, 8, 32, 128, 784))


def digits_cnn() -> nn.Module:
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10))


def mnist_cnn() -> nn.Module:
    layers = [nn.Conv2d(1, 8, 5, stride=2, padding=2), nn.ReLU()]
    layers += [nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), *perceptron(784, 64, 10))


def batchnorm_cnn(classes: int = 10) -> nn.Module:
    """Three convolutions with BatchNorm, for 3 x 32 x 32."""
    layers: list[nn.Module] = []
    for a, b in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(b)]
        layers += [nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, classes))


def small_resnet(inputs: int = 3, widths: tuple[int, ...] = (8, 8, 16, 32)) -> nn.Module:
    """A ResNet in the manner of He et al. (2016), Sec. 4.2; by default ResNet-8."""
    first, last = widths[0], widths[-1]
    start = [nn.Conv2d(inputs, first, 3, padding=1, bias=False), nn.BatchNorm2d(first), nn.ReLU()]
    blocks = [BasicBlock(a, b, stride=1 if a == b else 2) for a, b in pairwise(widths)]
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, 10)]
    return nn.Sequential(*start, *blocks, *end)


class LowRank(nn.Module):
    """A weight W that stays, plus B A: LoRA (Hu and others, 2021), B = 0 at the start."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = weight.flatten(1).shape
        self.A = nn.Parameter(torch.empty(rank, columns))
        self.B = nn.Parameter(torch.zeros(rows, rank))
        nn.init.kaiming_uniform_(self.A, a=5**0.5)  # as nn.Linear's weights

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.B @ self.A).view_as(weight)


def add_low_rank(model: nn.Module, rank: int) -> nn.Module:
    """Freeze the model, and give each linear layer and convolution a change of low rank."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        if isinstance(module, nn.Linear | nn.Conv2d):
            change = LowRank(module.weight, rank)
            nn.utils.parametrize.register_parametrization(module, "weight", change)
    return model


class _Layer(nn.Module):
    """Causal or full attention with four heads, and a perceptron."""

    def __init__(self, width: int, *, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, 4, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class GPT(nn.Module):
    """A pre-norm transformer decoder on characters; returns logits class-second."""

    def __init__(self, vocabulary: int, length: int, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(_Layer(width) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.tokens(codes) + self.places(torch.arange(codes.shape[1], device=codes.device))
        logits: Tensor = self.head(self.norm(self.layers(x)))
        return logits.transpose(1, 2)


class ViT(nn.Module):
    """A pre-norm vision transformer for 3 x 32 x 32: patches of 4 x 4, the mean over them."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.places = nn.Parameter(0.02 * torch.randn(64, width))
        self.layers = nn.Sequential(*(_Layer(width, causal=False) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        logits: Tensor = self.head(self.norm(self.layers(x)).mean(1))
        return logits
