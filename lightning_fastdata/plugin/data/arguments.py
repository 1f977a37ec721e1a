"""Checks of the arguments of the public classes, and of those that a subclass keeps to itself."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from lightning_fastdata.errors import FastDataWarning, OptionsError
from lightning_fastdata.planning.options import LoaderOptions, check, check_callable
from lightning_fastdata.types import STAGES

if TYPE_CHECKING:
    from lightning_fastdata.plugin.data.datamodule import DataModuleHooks as DataModule
    from lightning_fastdata.types import Shuffle, Stage

C = TypeVar("C", bound=type)
LOADER_ARGUMENTS: Final = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
"""Arguments of torch's DataLoader that are options of the same name."""
# Looked up when a loader is made; what other arguments say has gone into objects by then.
_TAKEN_OVER: Final = ("batch_size", "drop_last", "seed")
_OPTIONS: Final = frozenset(field.name for field in fields(LoaderOptions))


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise OptionsError if a value is not one of those allowed."""
    if value not in allowed:
        raise OptionsError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}.")


def check_batches(collate_fn: object, *, drop_last: object, image: object, mask: object) -> None:
    """Raise OptionsError if what decides the form of batches has an impossible value."""
    check_callable("collate_fn", collate_fn, "the samples of a batch and returns the batch")
    check("drop_last", drop_last, isinstance(drop_last, bool), "True and False")
    for name, field in (("image", image), ("mask", mask)):
        fine = isinstance(field, str | int | None)
        check(name, field, fine, "None, a key of the samples and a position in them")


def checked_batch_size(batch_size: object) -> int:
    """Return the batch size; raises OptionsError unless it is a whole number of at least 1."""
    if batch_size is None:
        raise OptionsError(
            "batch_size=None has to be a whole number of at least 1, as a data module makes "
            "batches. For a dataset that gives batches already, override train_dataloader() to "
            'return self.make_loader(dataset, stage="train", batch_size=None).'
        )
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise OptionsError(f"batch_size={batch_size!r} has to be a whole number of at least 1.")
    return batch_size


def take_batch_size(module: DataModule, batch_size: object) -> None:
    """Have a data module load batches of this size; ``"auto"``: of 32, until one is chosen.

    Raises:
        OptionsError: It is something else, or nothing will choose one.
    """
    module.chooses_batch_size = batch_size == "auto"
    if module.chooses_batch_size and module.guard == "off":
        raise OptionsError(
            'batch_size="auto" and guard="off" contradict each other, as the guard '
            'chooses the size by trying training steps. Set guard="warn", or a batch size.'
        )
    module.batch_size = 32 if module.chooses_batch_size else checked_batch_size(batch_size)


def checked_shuffle(shuffle: object) -> Shuffle | Mapping[str, Shuffle] | None:
    """Return how to shuffle: training, or the stages of a dict; None: training is shuffled.

    Raises:
        OptionsError: It is something else, or names a stage that does not exist.
    """
    if isinstance(shuffle, Mapping):
        _check_stages("shuffle", shuffle)
    values = shuffle.values() if isinstance(shuffle, Mapping) else (shuffle,)
    if not all(isinstance(value, bool | None) or value == "blocks" for value in values):
        raise OptionsError(
            f'shuffle={shuffle!r} has to be True, False or "blocks", for training, or a dict '
            f"of them by stage ({', '.join(STAGES)})."
        )
    return shuffle  # type: ignore[return-value]  # each value was looked at


def shuffles(shuffle: Shuffle | Mapping[str, Shuffle] | None, stage: Stage) -> Shuffle | None:
    """Return how a stage is to be shuffled; None: the user did not say."""
    if isinstance(shuffle, Mapping):
        return shuffle.get(stage)
    return shuffle if stage == "train" else None


def _check_stages(name: str, by_stage: Mapping[str, object]) -> None:
    for stage in by_stage:
        if stage not in STAGES:
            raise OptionsError(
                f"{name} has the key {stage!r}, which is no stage. Stages are {', '.join(STAGES)}."
            )


# -- arguments that a subclass keeps to itself -----------------------------------------------------


def remembers_given(cls: C) -> C:
    """Have the objects of a class remember which arguments their constructor was given.

    An attribute that a subclass has set before it calls the constructor counts as given.
    """
    construct: Callable[..., None] = vars(cls)["__init__"]
    parameters = inspect.signature(construct)

    @functools.wraps(construct)
    def __init__(self: object, *args: object, **kwargs: object) -> None:  # noqa: N807
        before = {name: vars(self)[name] for name in _TAKEN_OVER if name in vars(self)}
        construct(self, *args, **kwargs)
        given = parameters.bind(self, *args, **kwargs).arguments
        vars(self).update({name: before[name] for name in before if name not in given})
        vars(self)["_not_given"] = {
            name: parameter.default
            for name, parameter in parameters.parameters.items()
            if name not in {"self", *given, *before}
        }

    vars(__init__)["remembers"] = True
    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def _not_given(module: object) -> dict[str, object]:
    return vars(module).get("_not_given") or {}


def take_over_hyperparameters(module: Any) -> None:
    """Use what a subclass was given, has saved as hyperparameter, and has not passed on.

    Lightning's usual data module takes ``batch_size``, calls ``super().__init__()`` and then
    ``save_hyperparameters()``. Its batch size, seed and drop_last are used; for other arguments of
    :class:`FastDataModule` that have come no further there is a warning.
    """
    saved, defaults = module.hparams_initial, _not_given(module)
    lost = []
    for name in [name for name in defaults if name in saved]:
        default, value = defaults.pop(name), saved[name]
        now = getattr(module, name, default)
        if value == default or now not in (default, LoaderOptions()):
            continue  # as it is here, or set by the subclass
        if name == "batch_size":
            take_batch_size(module, value)
        elif name in _TAKEN_OVER:
            setattr(module, name, value)
        else:
            lost.append(name)
    if lost:
        _warn_of_lost(module, lost)


def warn_of_lost_batch_size(module: DataModule, overrides: Collection[str]) -> None:
    """Warn of a subclass that takes ``batch_size`` and keeps it to itself.

    Its hyperparameters were taken over; ``overrides`` are set for the one loader that is made.
    """
    construct = type(module).__init__
    if "batch_size" in overrides or "remembers" in vars(construct):
        return
    taken = "batch_size" in inspect.signature(construct).parameters
    if taken and module.batch_size == _not_given(module).pop("batch_size", None):
        _warn_of_lost(module, ["batch_size"])


def _warn_of_lost(module: object, names: Sequence[str]) -> None:
    passed = ", ".join(f"{name}={name}" for name in names)
    warnings.warn(
        f"{type(module).__name__} takes {' and '.join(names)} and does not pass it on, so that the "
        f"default of FastDataModule is used. Call super().__init__({passed}).",
        FastDataWarning,
        stacklevel=3,
    )


# -- options ---------------------------------------------------------------------------------------


def joined_options(
    options: LoaderOptions | Mapping[str, LoaderOptions] | None, given: Mapping[str, Any]
) -> LoaderOptions | dict[Stage, LoaderOptions]:
    """Return the options of a data module, for all stages or for each, with the arguments given.

    Raises:
        OptionsError: They are no options, name a stage that does not exist, or contradict an
            argument.
    """
    if isinstance(options, Mapping) and not _OPTIONS & set(options):
        _check_stages("options", options)
        return {s: _joined(options.get(s), given, f"options[{s!r}]") for s in STAGES}
    return _joined(options, given, "options")


def _joined(options: object, given: Mapping[str, Any], name: str) -> LoaderOptions:
    options = LoaderOptions() if options is None else options
    if not isinstance(options, LoaderOptions):
        raise OptionsError(
            f"{name}={options!r} is a {type(options).__name__}; pass LoaderOptions(...), or a dict "
            f"of them by stage ({', '.join(STAGES)})."
        )
    asked = {key: value for key, value in given.items() if value is not None and value != "auto"}
    for key, value in asked.items():
        other = getattr(options, key)
        if other not in ("auto", value):
            raise OptionsError(
                f"{key}={value!r} and {name}=LoaderOptions({key}={other!r}) contradict each other. "
                "Set it in one place."
            )
    return replace(options, **asked)


def options_of(module: DataModule, stage: Stage) -> LoaderOptions:
    """Return the options of one stage; those of a stage that is missing are the defaults."""
    options = module.options
    return options if isinstance(options, LoaderOptions) else options.get(stage, LoaderOptions())


def options_from(
    options: LoaderOptions, overrides: Mapping[str, Any]
) -> tuple[LoaderOptions, dict[str, Any]]:
    """Return a stage's options, in which a loader's arguments win, and arguments that are none.

    So a plan knows of them. ``multiprocessing_context`` may also be a context, which is none.
    """
    asked, others = {}, {}
    for name, value in overrides.items():
        context = name == "multiprocessing_context" and not isinstance(value, str | None)
        if name not in _OPTIONS or context:
            others[name] = value
        elif value is not None:
            asked[name] = value
    return replace(options, **asked), others
