"""YAML and JSON, read as a person means them, with the line of everything.

NVIDIA's plugin reads YAML with go-yaml. PyYAML differs in ways that matter here, so that parts of it are replaced:
``0:1`` names a MIG device, where YAML 1.1 has the number 1 in base 60; dates are texts; and of two equal keys neither
wins, they are an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import yaml

__all__ = ["Document", "DocumentError", "read_document"]

# Aliases make a few lines stand for millions of values. No real configuration has as many.
MOST_VALUES: Final = 100_000

MERGE: Final = "tag:yaml.org,2002:merge"


class DocumentError(Exception):
    """The text is neither YAML nor JSON. ``line`` is 1-based, 0 if unknown."""

    def __init__(self, what: str, line: int = 0) -> None:
        super().__init__(what)
        self.line = line


@dataclass(frozen=True, slots=True)
class Document:
    """What a text says.

    Attributes:
        value: of dicts, lists, texts, numbers, booleans and None.
        lines: where each part begins, 1-based, by its path: ``$.sharing.timeSlicing.resources[0].name``. Empty for JSON
            that is no YAML.
    """

    value: Any
    lines: Mapping[str, int]


def read_document(content: bytes, canonical: Callable[[str], str]) -> Document:
    """Decodes a text.

    Args:
        content: UTF-8 or UTF-16, YAML or JSON.
        canonical: the spelling of a key that is known in another.

    Raises:
        DocumentError: it cannot be decoded.
    """
    try:
        return _Reader(content, canonical).document()
    except (yaml.YAMLError, DocumentError, RecursionError, ValueError) as error:
        # JSON may be indented with tabs, which YAML does not allow.
        if content.lstrip().startswith(b"{") and isinstance(error, yaml.YAMLError):
            try:
                return Document(json.loads(content, object_pairs_hook=lambda pairs: _object(pairs, canonical)), {})
            except ValueError:
                pass
        raise _explained(error) from None


def _object(pairs: list[tuple[str, Any]], canonical: Callable[[str], str]) -> dict[str, Any]:
    made = {canonical(key): value for key, value in pairs}
    if len(made) != len(pairs):
        raise DocumentError("a key is given twice")
    return made


def _explained(error: Exception) -> DocumentError:
    match error:
        case DocumentError():
            return error
        case yaml.MarkedYAMLError():
            mark = error.problem_mark or error.context_mark
            return DocumentError(error.problem or "it is no YAML", mark.line + 1 if mark else 0)
        case RecursionError():
            return DocumentError("it is nested too deeply")
        case _:
            return DocumentError(str(error).splitlines()[0] if str(error) else "it is no YAML")


class _Loader(yaml.SafeLoader):
    """Reads scalars as go-yaml does."""


_Loader.yaml_implicit_resolvers = {
    first: [each for each in resolvers if each[0].rpartition(":")[2] not in {"int", "float", "timestamp", "value"}]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*)\Z", re.ASCII),
    list("-+0123456789"),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9]+)([eE][-+]?[0-9]+)?\Z", re.ASCII),
    list("-+0123456789."),
)


class _Reader:
    """One text."""

    def __init__(self, content: bytes, canonical: Callable[[str], str]) -> None:
        self._loader = _Loader(content)
        self._canonical = canonical
        self._lines: dict[str, int] = {}
        self._values = 0

    def document(self) -> Document:
        node = self._loader.get_single_node()
        return Document(None if node is None else self._read(node, "$"), self._lines)

    def _read(self, node: yaml.Node, path: str) -> Any:
        self._values += 1
        if self._values > MOST_VALUES:
            raise DocumentError("it holds too many values", node.start_mark.line + 1)
        self._lines.setdefault(path, node.start_mark.line + 1)
        match node:
            case yaml.MappingNode():
                return self._mapping(node, path)
            case yaml.SequenceNode():
                return [self._read(each, f"{path}[{position}]") for position, each in enumerate(node.value)]
            case _:
                return self._loader.construct_object(node)

    def _mapping(self, node: yaml.MappingNode, path: str) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for key, value in node.value:
            if key.tag == MERGE:
                for each in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if not isinstance(each, yaml.MappingNode):
                        raise DocumentError("what is merged with << has no keys", key.start_mark.line + 1)
                    merged = self._mapping(each, path) | merged
        made: dict[str, Any] = {}
        for key, value in node.value:
            if key.tag == MERGE:
                continue
            line = key.start_mark.line + 1
            name = self._canonical(str(key.value)) if isinstance(key, yaml.ScalarNode) else ""
            if not name or name in made:
                raise DocumentError(f"the key {name!r} is given twice" if name else "a key is not a text", line)
            self._lines[f"{path}.{name}"] = line
            made[name] = self._read(value, f"{path}.{name}")
        return merged | made
