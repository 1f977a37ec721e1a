"""What has the structure of ``kornia.augmentation``, to test keys where Kornia is not installed.

Parameters come from ``forward_parameters(batch_shape)``, as dicts of tensors with a row for each
sample, or none where the batch draws; sequences name them by module. The pixels are of no matter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn


class ParamItem(NamedTuple):
    name: str
    data: Any


class AugmentationBase2D(nn.Module):
    def __init__(self, p=0.5, same_on_batch=False, p_batch=1.0):
        super().__init__()
        self.p, self.same_on_batch, self.p_batch = p, same_on_batch, p_batch

    def forward_parameters(self, batch_shape):
        rows = 1 if self.same_on_batch else batch_shape[0]
        prob = (torch.rand(rows) < self.p).float().expand(batch_shape[0])
        prob = prob * (torch.rand(1) < self.p_batch) if self.p_batch < 1 else prob
        drawn = self.draw(batch_shape, rows)
        shape = torch.tensor(list(batch_shape))
        return {**drawn, "batch_prob": prob, "forward_input_shape": shape}

    def forward(self, images, params=None):
        params = self.forward_parameters(images.shape) if params is None else params
        chosen = params["batch_prob"].to(images)[:, None, None, None] > 0.5
        return torch.where(chosen, self.apply(images, params), images)


class GeometricAugmentationBase2D(AugmentationBase2D):
    pass


class RandomHorizontalFlip(GeometricAugmentationBase2D):
    def draw(self, batch_shape, rows):
        return {}

    def apply(self, images, params):
        return images.flip(-1)


class RandomBrightness(AugmentationBase2D):
    def draw(self, batch_shape, rows):
        return {"brightness_factor": torch.rand(rows).expand(batch_shape[0])}

    def apply(self, images, params):
        return images * params["brightness_factor"].to(images)[:, None, None, None]


class ColorJitter(RandomBrightness):
    """Draws an order for the batch."""

    def draw(self, batch_shape, rows):
        return {**super().draw(batch_shape, rows), "order": torch.randperm(4)}

    def apply(self, images, params):
        return super().apply(images, params) + params["order"][0].to(images)


class RandomContrast(RandomBrightness):
    """Has rows for those samples alone that it is applied to, as releases before 0.9 do."""

    def forward_parameters(self, batch_shape):
        prob = (torch.rand(batch_shape[0]) < self.p).float()
        drawn = {"contrast_factor": torch.rand(int(prob.sum()))}
        shape = torch.tensor(list(batch_shape))
        return {**drawn, "batch_prob": prob, "forward_input_shape": shape}

    def forward(self, images, params=None):
        params = self.forward_parameters(images.shape) if params is None else params
        made, chosen = images.clone(), params["batch_prob"] > 0.5
        made[chosen] *= params["contrast_factor"].to(images)[:, None, None, None]
        return made


class RandomRain(AugmentationBase2D):
    """Draws as many coordinates for each sample as the longest of the batch has."""

    def draw(self, batch_shape, rows):
        drops = int(torch.randint(100, 2000, (batch_shape[0],)).max())
        return {"coordinates_factor": torch.rand(batch_shape[0], drops, 2)}

    def apply(self, images, params):
        return images


class MixAugmentationBaseV2(AugmentationBase2D):
    pass


class RandomMixUpV2(MixAugmentationBaseV2):
    def draw(self, batch_shape, rows):
        pairs = torch.randperm(batch_shape[0])
        return {"mixup_pairs": pairs, "mixup_lambdas": torch.rand(batch_shape[0])}

    def apply(self, images, params):
        share = params["mixup_lambdas"].to(images)[:, None, None, None]
        return images * (1 - share) + images[params["mixup_pairs"]] * share


class ImageSequential(nn.Sequential):
    def __init__(self, *modules, random_apply=False):
        super().__init__()
        for number, module in enumerate(modules):
            self.add_module(f"{type(module).__name__}_{number}", module)
        self.random_apply = random_apply

    def forward_parameters(self, batch_shape):
        names = list(self._modules)
        if self.random_apply:
            names = [names[i] for i in torch.randperm(len(names))[: self.random_apply].tolist()]
        return [ParamItem(name, self._drawn(name, batch_shape)) for name in names]

    def _drawn(self, name, batch_shape):
        module = self.get_submodule(name)
        draws = hasattr(module, "forward_parameters")
        return module.forward_parameters(batch_shape) if draws else None

    def forward(self, images, params=None):
        for name, data in self.forward_parameters(images.shape) if params is None else params:
            module = self.get_submodule(name)
            images = module(images) if data is None else module(images, params=data)
        return images


class AugmentationSequential(ImageSequential):
    def __init__(self, *modules, data_keys=("input",), **options):
        super().__init__(*modules, **options)
        self.data_keys = None if data_keys is None else list(data_keys)

    def forward(self, *given, params=None, data_keys=None):
        keys = [str(key).lower() for key in data_keys or self.data_keys]
        if params is None:
            params = self.forward_parameters(given[keys.index("input")].shape)
        made = [self._made(*pair, params) for pair in zip(keys, given, strict=True)]
        return made[0] if len(made) == 1 else made

    def _made(self, key, one, params):
        for name, data in params:
            module = self.get_submodule(name)
            moves = isinstance(module, GeometricAugmentationBase2D)
            if key == "input" or (moves and key != "label"):
                one = module(one) if data is None else module(one, params=data)
        return one


class PatchSequential(ImageSequential):
    pass
