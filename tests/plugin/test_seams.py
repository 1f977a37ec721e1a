"""What is asked of Lightning beyond its documentation is there, and is put back after each run."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import pytest
import torch
from conformance.pieces import Linear, Rows, RowsModule, make_trainer
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import CombinedLoader
from misses import each
from torch.utils.data import DataLoader

import lightning_fastdata
from lightning_fastdata import DataThroughputCallback
from lightning_fastdata.plugin import seams
from lightning_fastdata.plugin.recording import attach_tee
from lightning_fastdata.plugin.seams import average_exactly, replace_for_one_run, unseen_steps

PACKAGE = Path(lightning_fastdata.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs" / "seams.md").read_text("utf-8")
NAMES = (
    "_data_source", "_loaded_from_state_dict", "_batches_that_stepped", "_combined_loader",
    "_accelerator_connector", "_data_connector", "_datahook_selector",
    "_checkpoint_connector", "_loaded_checkpoint", "_data_fetcher", "_val_check_time_interval",
)  # fmt: skip
CLASSES_KNOWN_BY_NAME = {
    "DataHooks": "core.hooks",
    "ModelHooks": "core.hooks",
    "CUDAAccelerator": "accelerators",
    "PassThroughProfiler": "profilers",
    "DummyLogger": "loggers.logger",
    "SingleDeviceStrategy": "strategies",
    "GradientAccumulationScheduler": "callbacks",
    "Checkpoint": "callbacks",
    "EarlyStopping": "callbacks",
    "Timer": "callbacks",
    "LearningRateFinder": "callbacks",
    "BatchSizeFinder": "callbacks",
    "ProgressBar": "callbacks",
    "StochasticWeightAveraging": "callbacks",
    "LearningRateMonitor": "callbacks",
    "ModelSummary": "callbacks",
    "SaveConfigCallback": "cli",
}


@pytest.mark.parametrize("name", NAMES)
def test_only_the_seams_use_a_private_name_and_their_page_has_it(name):
    used = re.compile(rf"(?<!\w){name}(?!\w)")
    users = {
        file.relative_to(PACKAGE).parts[:2]
        for file in PACKAGE.rglob("*.py")
        if used.search(file.read_text("utf-8"))
    }
    assert users == {("plugin", "seams.py")}
    assert used.search(PAGE)


@each("name", CLASSES_KNOWN_BY_NAME)
def test_a_class_that_is_known_by_its_name_is_there(name):
    import importlib

    for package in ("lightning.pytorch", "pytorch_lightning"):
        module = pytest.importorskip(package)
        home = importlib.import_module(f"{module.__name__}.{CLASSES_KNOWN_BY_NAME[name]}")
        assert isinstance(getattr(home, name), type)


# -- what is read ----------------------------------------------------------------------------------


def test_each_loop_asks_its_own_source_for_loaders(tmp_path):
    trainer = make_trainer(tmp_path)
    loops = [trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop]
    loops += [trainer.validate_loop, trainer.test_loop, trainer.predict_loop]
    sources = [seams.data_source(loop) for loop in loops]
    assert None not in sources
    assert len(set(map(id, sources))) == 5
    assert seams.data_source(object()) is None


def test_it_is_known_whether_a_fit_was_given_loaders(tmp_path):
    heard = []

    class Asks(Linear):
        def on_train_start(self):
            heard.append(seams.loaders_owner(self.trainer.fit_loop))

    loader, module = DataLoader(Rows(8), 4), RowsModule()
    make_trainer(tmp_path, limit_val_batches=0).fit(Asks(), loader)
    make_trainer(tmp_path, limit_val_batches=0).fit(Asks(), module)
    assert heard[0] is loader
    assert heard[1] is module


def test_a_fit_that_resumes_is_told_from_one_that_does_not(tmp_path):
    heard = []

    class Asks(Linear):
        def on_train_start(self):
            heard.append(seams.began_from_file(self.trainer))

    trainer = make_trainer(tmp_path, limit_val_batches=0)
    trainer.fit(Asks(), RowsModule())
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    again = make_trainer(tmp_path, limit_val_batches=0, max_epochs=2)
    again.fit(Asks(), RowsModule(), ckpt_path=tmp_path / "end.ckpt")
    assert heard == [False, True]


def test_the_step_of_lightnings_axis_is_the_count_of_batches_that_stepped(tmp_path):
    trainer = make_trainer(tmp_path, limit_val_batches=0, accumulate_grad_batches=2)
    trainer.fit(Linear(), RowsModule(batch_size=8, length=32))
    assert seams.steps_logged_by(trainer, -1) == 2


@pytest.mark.parametrize("spreads", [True, False])
def test_whether_lightning_spreads_samples_is_what_the_user_said(tmp_path, spreads):
    trainer = make_trainer(tmp_path, use_distributed_sampler=spreads)
    assert seams.spreads_samples(trainer) is spreads


def test_a_trainer_that_forgot_its_training_loader_asks_for_another_one(tmp_path):
    asked = []

    class Counts(RowsModule):
        def train_dataloader(self):
            asked.append(self.batch_size)
            return super().train_dataloader()

    class Smaller(Callback):
        def on_fit_start(self, trainer, pl_module):
            assert trainer.estimated_stepping_batches == 4
            trainer.datamodule.batch_size = 4
            seams.forget_training_loader(trainer)

    trainer = make_trainer(tmp_path, limit_val_batches=0, callbacks=[Smaller()])
    trainer.fit(Linear(), Counts(batch_size=8, length=32))
    assert asked == [8, 4]
    assert trainer.num_training_batches == 8


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "sequential"])
def test_the_mode_of_a_combined_loader_makes_another_one_like_it(mode):
    loaders = {"a": DataLoader(Rows(2)), "b": DataLoader(Rows(4))}
    found = seams.combined_mode(CombinedLoader(loaders, mode))
    assert found == mode
    CombinedLoader(loaders, mode=found)
    assert seams.combined_mode(DataLoader(Rows(2))) is None


# -- what is replaced ------------------------------------------------------------------------------


class Parts:
    """A trainer's objects in which something is replaced, with their attributes as they are now."""

    def __init__(self, trainer, model, module):
        loops = [trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop]
        self.owners = [
            model, module, trainer.strategy,
            *map(seams.data_source, loops),
        ]  # fmt: skip
        self.profiler, self.trainer = trainer.profiler, trainer
        self.replaced = self.names()

    def names(self):
        """Methods that are attributes of the single objects."""
        return [
            sorted(n for n, v in vars(owner).items() if callable(v) and hasattr(type(owner), n))
            for owner in self.owners
        ]

    def are_as_before(self):
        return self.names() == self.replaced and self.trainer.profiler is self.profiler


def add_one(batch):
    return [batch[0] + 1, batch[1]]


class Foreign(LightningDataModule):
    """Keeps its loaders, and its teardown calls nothing."""

    def train_dataloader(self):
        return DataLoader(Rows(8), batch_size=4)

    def teardown(self, stage):
        pass


class Forgets(RowsModule):
    def teardown(self, stage):
        pass

    def on_exception(self, exception):
        pass


@pytest.mark.parametrize("ending", ["end", "exception"])
@pytest.mark.parametrize("data", [Foreign, Forgets])
def test_all_that_was_replaced_is_put_back_however_a_run_ends(tmp_path, data, ending):
    class Stops(Linear):
        def training_step(self, batch, batch_idx):
            average_exactly(self.trainer)
            if isinstance(module, RowsModule):
                assert not parts.are_as_before()
            if ending == "exception":
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch

    callbacks = [
        DataThroughputCallback(augment=add_one, summary=False, report=False) for _ in range(2)
    ]
    trainer = make_trainer(tmp_path, limit_val_batches=0, callbacks=callbacks)
    model, module = Stops(), data()
    parts = Parts(trainer, model, module)
    for number in range(2):
        if ending == "end":
            trainer.fit_loop.max_epochs = number + 1
            trainer.fit(model, datamodule=module)
            x, i = model.seen["train"][-1]
            assert torch.equal(x[:, 0], i + 2.0)  # by each callback once
        else:
            with pytest.raises(ZeroDivisionError):
                trainer.fit(model, datamodule=module)
        assert parts.are_as_before()
        selector = seams.hook_selector(trainer)
        assert "get_instance" not in vars(selector)


def doubled(batch):
    x, i = batch
    return 2 * x, i


def test_transforms_of_two_callbacks_run_in_the_order_of_the_callbacks(tmp_path):
    callbacks = [
        DataThroughputCallback(augment=augment, summary=False, report=False)
        for augment in (add_one, doubled)
    ]
    model = Linear()
    make_trainer(tmp_path, limit_val_batches=0, callbacks=callbacks).fit(
        model, datamodule=Foreign()
    )
    x, i = model.seen["train"][-1]
    assert torch.equal(x[:, 0], 2 * (i + 1.0))


@pytest.mark.parametrize("profiler", [None, "simple"])
@pytest.mark.parametrize("end", ["begin", "end"])
def test_what_a_listener_raises_is_told_and_the_training_goes_on(tmp_path, profiler, end):
    def fail():
        raise ZeroDivisionError("in measuring")

    told = []
    trainer = make_trainer(tmp_path, max_epochs=1, profiler=profiler)
    calls = ((fail,), ()) if end == "begin" else ((), (fail,))
    detach = attach_tee(
        trainer, lambda name: calls if name == "run_training_batch" else None, told.append
    )
    trainer.fit(Linear(), DataLoader(Rows(), batch_size=2))
    detach()
    assert [str(error) for error in told] == ["in measuring"] * trainer.global_step
    assert trainer.global_step


def test_the_attribute_of_before_comes_back(tmp_path):
    trainer, owner = make_trainer(tmp_path), Linear()
    owner.mine = "mine"
    for name in ("mine", "other", "mine"):
        replace_for_one_run(trainer, owner, name, "replaced")
    assert (owner.mine, owner.other) == ("replaced", "replaced")
    trainer.strategy.teardown()
    assert (owner.mine, hasattr(owner, "other")) == ("mine", False)
    assert "teardown" not in vars(trainer.strategy)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_puts_back_its_own_attributes(tmp_path, copied):
    trainer = make_trainer(tmp_path)
    average_exactly(trainer)
    twin = copied(trainer.strategy)
    twin.teardown()
    assert "reduce" not in vars(twin)
    assert "reduce" in vars(trainer.strategy)


def test_steps_that_nobody_sees_leave_nothing_behind(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    trainer, model = make_trainer(tmp_path, logger=logger), Linear()
    model.log = shadow = lambda *_: None
    before = trainer.callbacks, trainer.loggers, trainer.profiler

    def fails():
        with unseen_steps(trainer, model):
            assert trainer.callbacks == []
            assert logger not in trainer.loggers
            assert trainer.logger.log_dir == trainer.log_dir == logger.log_dir
            assert model.log("name", 1) is None
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert (trainer.callbacks, trainer.loggers, trainer.profiler) == before
    assert vars(model)["log"] is shadow
    assert "log_dict" not in vars(model)
