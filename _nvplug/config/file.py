"""The configuration file: the schema of NVIDIA's plugin, decoded strictly.

That plugin ignores what it does not know, so that a misspelt key is a default. Here it is an error, which names the
file, the line, the key, its value, what is allowed, and the key that was likely meant. As there, the case of keys does
not matter, and null is the same as nothing.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from _nvplug.config.document import Document, DocumentError, read_document
from _nvplug.config.schema import BY_KEY, FileText, at, canonical, keys_at
from _nvplug.config.sections import SECTIONS, WrongError
from _nvplug.config.written import FileContent, Written
from _nvplug.errors import OptionError

__all__ = ["decode_file", "read_file"]

LONGEST_FILE: Final = 1 << 20
"""Bytes: what a ConfigMap can hold."""


def read_file(path: str) -> FileContent:
    """Reads and decodes a file.

    Raises:
        OptionError: it cannot be read, or asks for what cannot be done.
    """
    remedy = "name a YAML or JSON file, or leave --config-file out"
    shown = path if path.isprintable() else repr(path)
    try:
        with Path(path).open("rb") as file:
            content = file.read(LONGEST_FILE + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise OptionError(f"cannot read the configuration file {shown}: {reason}", remedy=remedy) from error
    if len(content) > LONGEST_FILE:
        raise OptionError(f"{shown} is longer than {LONGEST_FILE} bytes", remedy=remedy)
    return decode_file(content, shown)


def decode_file(content: bytes, path: str) -> FileContent:
    """Decodes the content of a file; ``path`` is for messages.

    Raises:
        OptionError: naming the file, the line, the key, its value, and what is allowed.
    """
    try:
        document = read_document(content, canonical)
    except DocumentError as error:
        place = f"{path}:{error.line}" if error.line else path
        raise OptionError(f"{place}: {error}", remedy="correct it: it must be YAML or JSON, in UTF-8") from None
    text = _Text(path, document)
    try:
        file = msgspec.convert({} if document.value is None else document.value, FileText)
        return text.content(file)
    except msgspec.ValidationError as error:
        raise text.misfit(str(error)) from None
    except WrongError as error:
        raise text.wrong(error.where, error.what) from None


class _Text:
    """A file that was read: what it says, and where."""

    def __init__(self, path: str, document: Document) -> None:
        self._path = path
        self._document = document

    def content(self, file: Any) -> FileContent:
        if file.version not in {None, "", "v1"}:
            raise WrongError("$.version", "allowed is v1")
        values = {}
        for key in BY_KEY:
            value = at(self._document.value, f"$.{key}")
            if value is not None:
                values[key] = Written(self._origin(f"$.{key}"), _as_text(value))
        sections: dict[str, Any] = {}
        origins: dict[str, str] = {}
        obeyed: list[str] = []
        for field, where, make in SECTIONS:
            value = at(file, where)
            if value is not None:
                sections[field] = make(value, where, obeyed)
                origins[field] = self._origin(where)
        return FileContent(
            MappingProxyType(values), MappingProxyType(sections), MappingProxyType(origins), tuple(obeyed)
        )

    def misfit(self, message: str) -> OptionError:
        """The error for what does not fit the schema, out of msgspec's words for it."""
        what, _, below = message.rpartition(" - at `$") if " - at `$" in message else (message, "", "`")
        where = "$" + below.removesuffix("`")
        name = (re.findall("`([^`]*)`", what) or [""])[-1]
        if "unknown field" in what:
            known = keys_at(where)
            near = difflib.get_close_matches(name.lower(), [key.lower() for key in known], n=1)
            parent = where[2:] or "the file"
            return OptionError(
                f"{self._place(f'{where}.{name}')}: there is no key {name!r} in {parent}",
                remedy=f"did you mean {canonical(near[0])}?" if near else f"allowed are {', '.join(known)}",
            )
        if "required field" in what:
            return self.wrong(where, f"it needs a {name!r}")
        expected = (re.findall("`([^`]*)`", what) or [""])[0].split(" | ")
        return self.wrong(
            where, f"expected {' or '.join(_WORDS.get(each, each) for each in expected if each != 'null')}"
        )

    def wrong(self, where: str, what: str) -> OptionError:
        """The error for a value."""
        value = repr(at(self._document.value, where))
        shown = value if len(value) <= LONGEST_SHOWN else value[:LONGEST_SHOWN] + "…"
        if where == "$":
            return OptionError(f"{self._path} is {shown}: {what}", remedy=f"correct {self._path}")
        origin = self._origin(where)
        return OptionError(f"{origin} is {shown}: {what}", remedy=f"correct or remove {where[2:]}")

    def _origin(self, where: str) -> str:
        return f"{where[2:]} ({self._place(where)})"

    def _place(self, where: str) -> str:
        line = self._document.lines.get(where)
        return f"{self._path}:{line}" if line else self._path


LONGEST_SHOWN: Final = 60

_WORDS: Final = {
    "array": "a list",
    "bool": "true or false",
    "int": "a whole number",
    "object": "keys and values",
    "str": "a text",
}


def _as_text(value: Any) -> str:
    """A value as a flag would have it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
