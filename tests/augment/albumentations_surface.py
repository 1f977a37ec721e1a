"""What every transform of the installed Albumentations looks like from outside.

``python tests/augment/albumentations_surface.py > tests/augment/albumentations_2_0_8.json`` writes
it down anew, once device forms and tests have been gone through for another version.
"""

from __future__ import annotations

import inspect
import json
import os
import sys

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import albumentations as A


def surface() -> dict:
    """Return, by class name, the base, the arguments with their defaults, and the targets."""
    classes = {
        name: kind
        for name, kind in vars(A).items()
        if inspect.isclass(kind) and issubclass(kind, A.BasicTransform | A.BaseCompose)
    }
    return {
        "version": A.__version__,
        "transforms": {name: _described(kind) for name, kind in sorted(classes.items())},
    }


def _described(kind) -> dict:
    targets = getattr(kind, "_targets", ())
    targets = targets if isinstance(targets, tuple) else (targets,)
    return {
        "base": kind.__mro__[1].__name__,
        "arguments": {
            name: _default(one)
            for name, one in inspect.signature(kind.__init__).parameters.items()
            if name != "self" and one.kind not in {one.VAR_POSITIONAL, one.VAR_KEYWORD}
        },
        "targets": sorted(target.value for target in targets),
        "overrides": sorted(
            name
            for name in ("__call__", "apply_with_params", "should_apply", "update_transform_params")
            if name in vars(kind)
        ),
    }


def _default(parameter) -> str:
    if parameter.default is parameter.empty:
        return "required"
    return getattr(parameter.default, "__name__", repr(parameter.default))


def changed(before: dict, after: dict) -> list[str]:
    """Return the names of the classes that one of two surfaces lacks, or has otherwise."""
    old, new = before["transforms"], after["transforms"]
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


if __name__ == "__main__":
    json.dump(surface(), sys.stdout, indent=1, sort_keys=True)
    sys.stdout.write("\n")
