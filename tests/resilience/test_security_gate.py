"""No file's content is ever run: what could do so is called in the places listed here alone."""

from __future__ import annotations

import ast
from pathlib import Path

from misses import each

import lightning_fastdata

ROOT = Path(lightning_fastdata.__file__).parent
PIPE = "messages between our own processes, over pipes that have no name"

ALLOWED = {
    ("augment/torchvision/forms.py", "pickle.loads"): f"what was drawn for a batch: {PIPE}",
    ("executors/pool/protocol.py", "pickle.loads"): PIPE,
    ("loading/facts.py", "pickle.loads"): f"{PIPE}, and what it has just pickled itself",
    ("batches/memory.py", "pickle.Unpickler"): f"batches: {PIPE}",
    ("ext/ray/actor.py", "pickle.loads"): "what a training sends through its own Ray cluster",
    ("sources/shared.py", "pickle.loads"): "memory that this user has sealed",
    ("executors/stream_state.py", "pickle.loads"): f"states of streams: {PIPE}",
    ("cli.py", "exec_module"): "the file with the data module, named by the user",
}
"""Module and call -> why it may."""

_FORBIDDEN = {
    *("eval", "exec", "__import__", "extractall", "exec_module", "full_load"),
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load", "joblib.load", "shelve.open"),
    *("dill.load", "dill.loads", "cloudpickle.load", "cloudpickle.loads", "os.system"),
    *("pandas.read_pickle", "jsonpickle.decode", "tempfile.mktemp"),
}
_MODULES = {name.partition(".")[0] for name in _FORBIDDEN if "." in name} - {"os", "tempfile"}
_MODULES -= {"pickle", "yaml", "pandas"}


def calls(source: str) -> set[str]:
    """Return what in a module could run what a file holds, by its name without aliases."""
    tree = ast.parse(source)
    known = {}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {one.asname or one.name: one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            known |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    found |= {name for name in known.values() if name.partition(".")[0] in _MODULES}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            name, method = spelled(node, known), getattr(node, "attr", None)
            # Of a module a function, however it is handed on; else any method of this name.
            if name in _FORBIDDEN:
                found.add(name)
            elif method in ("extractall", "exec_module"):
                found.add(method)
        if isinstance(node, ast.Call):
            name = spelled(node.func, known)
            options = {one.arg: one.value for one in node.keywords}
            if name == "torch.load" and not is_constant(options.get("weights_only"), True):
                found.add(name)
            if "allow_pickle" in options and not is_constant(options["allow_pickle"], False):
                found.add("allow_pickle")
            if name.startswith("subprocess.") and is_constant(options.get("shell"), True):
                found.add("shell=True")
    return found


def spelled(node: ast.AST, known: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{spelled(node.value, known)}.{node.attr}"
    return known.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def is_constant(node: ast.AST | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def test_what_could_run_a_files_content_is_called_in_the_listed_places_alone() -> None:
    found = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in sorted(ROOT.rglob("*.py"))
        for name in calls(path.read_text(encoding="utf-8"))
    }
    assert found == set(ALLOWED)


@each(
    ("source", "name"),
    [
        ("import pickle\npickle.load(file)", "pickle.load"),
        ("import pickle as p\nfunction = p.loads", "pickle.loads"),
        ("from pickle import loads as read\nread(data)", "pickle.loads"),
        ("class Mine(pickle.Unpickler): pass", "pickle.Unpickler"),
        ("import torch\ntorch.load(path)", "torch.load"),
        ("from torch import load\nload(path, weights_only=False)", "torch.load"),
        ("eval(text)", "eval"),
        ("exec(text)", "exec"),
        ("import marshal", "marshal"),
        ("import yaml\nyaml.load(text, Loader=yaml.Loader)", "yaml.load"),
        ("import numpy as np\nnp.load(path, allow_pickle=True)", "allow_pickle"),
        ("archive.extractall(folder)", "extractall"),
        ("import joblib", "joblib"),
        ("from shelve import open", "shelve.open"),
        ("import subprocess\nsubprocess.run(text, shell=True)", "shell=True"),
    ],
)
def test_the_gate_sees_each_of_them(source, name) -> None:
    assert calls(source) == {name}
