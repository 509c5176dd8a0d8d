"""Imports the modules that it is given, and writes, as JSON, each text that dataclasses and attrs compile meanwhile.

bundle.py runs it, in a process of its own.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import importlib
import json
import sys
from typing import Any

__all__: list[str] = []

texts: set[str] = set()
true_compile, true_hash = compile, hash


def execute(text: str, *namespaces: Any) -> None:
    """In place of the built-in, for dataclasses."""
    texts.add(text)
    exec(text, *namespaces)  # noqa: S102  # as it would have been


def record(source: Any, filename: str, *options: Any, **more: Any) -> Any:
    """In place of the built-in, for everybody."""
    if isinstance(source, str) and filename.startswith("<attrs "):
        texts.add(source)
    return true_compile(source, filename, *options, **more)


def constant(thing: Any) -> int:
    """In place of the built-in hash, for everybody; for attrs what it is in boot.py."""
    return 0 if isinstance(thing, str) and thing.startswith("<attrs ") else true_hash(thing)


dataclasses.exec = execute  # type: ignore[attr-defined]  # found there before the built-in
builtins.compile = record  # type: ignore[assignment]  # for whoever calls it without types
builtins.hash = constant
sys.path.insert(0, ".")
for name in sys.argv[1:]:
    # A module that is for another platform, say, is not imported in the program either.
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
sys.stdout.write(json.dumps(sorted(texts)))
