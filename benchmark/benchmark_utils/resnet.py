"""ResNet-18 and -34 of He, Zhang, Ren and Sun (2016), table 1.

Written from the paper; parameter names follow torchvision's, so that weights can be
exchanged. The last layer has as many outputs as there are classes.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (figure 2), option B where shapes change."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
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
        return self.relu(self.bn2(self.conv2(y)) + shortcut)


def resnet(blocks: tuple[int, int, int, int], classes: int) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(3, 64, 7, 2, padding=3, bias=False),
        bn1=nn.BatchNorm2d(64),
        relu=nn.ReLU(),
        maxpool=nn.MaxPool2d(3, 2, padding=1),
    )
    inputs = 64
    for i, count in enumerate(blocks):
        outputs = 64 * 2**i
        strides = [1 if i == 0 else 2] + [1] * (count - 1)
        stage = []
        for stride in strides:
            stage.append(BasicBlock(inputs, outputs, stride))
            inputs = outputs
        layers[f"layer{i + 1}"] = nn.Sequential(*stage)
    layers["avgpool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["fc"] = nn.Linear(inputs, classes)
    model = nn.Sequential(layers)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def resnet18(classes: int = 10) -> nn.Sequential:
    return resnet((2, 2, 2, 2), classes)


def resnet34(classes: int = 10) -> nn.Sequential:
    return resnet((3, 4, 6, 3), classes)
