"""Hydra: the configuration says which classes are made; each run has a folder of its own."""

import hydra
import lightning.pytorch as pl
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from pieces import Model, fit

CONFIG = {
    "seed": 1,
    "data": {
        "_target_": "torch.utils.data.DataLoader",
        "dataset": {"_target_": "pieces.Photos"},
        "batch_size": 16,
        "shuffle": True,
    },
}
ConfigStore.instance().store("config", OmegaConf.create(CONFIG))


@hydra.main(version_base=None, config_name="config")
def main(config) -> None:
    pl.seed_everything(config.seed)
    fit(Model(), hydra.utils.instantiate(config.data))


if __name__ == "__main__":
    main()
