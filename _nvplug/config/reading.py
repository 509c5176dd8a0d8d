"""Reading flags, variables and the file into one frozen Config.

A flag wins over its variable, that over the file, and that over the default. Names, values and variables are those of
NVIDIA's plugin wherever it has the option, and so are the spellings, which are those of Go's package flag:

- one dash or two, and the value behind ``=`` or in the next word;
- a switch alone means true; it takes its value behind ``=`` only, as the next word is not its;
- of a repeated flag the last one counts, but a list grows by repetition as well as by commas;
- aliases are the same flag;
- an empty variable counts as unset.

Go stops at the first word that is no flag, and ignores the rest. That is how ``--pass-device-specs false`` comes to
mean true, so here it is an error.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeVar

from _nvplug.config.model import Config
from _nvplug.config.options import INERT, OPTIONS, Option
from _nvplug.config.written import FileContent, Written
from _nvplug.errors import OptionError

__all__ = ["Settings", "read_config", "read_settings"]

DEFAULT: Final = "default"


@dataclass(frozen=True, slots=True)
class Settings:
    """A Config, and how it came about.

    Attributes:
        config: what is in force.
        origins: where each value of it stands, by the name of its field: a flag, a variable, a key of the file with its
            line, or ``default``.
        file: what the file says besides.
    """

    config: Config
    origins: Mapping[str, str]
    file: FileContent


def read_config(arguments: Sequence[str], environment: Mapping[str, str]) -> Config:
    """The Config of `read_settings`."""
    return read_settings(arguments, environment).config


def read_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Makes the Config from the command line, the environment, and the file that they name.

    Args:
        arguments: the flags, without the program and the command.
        environment: the variables.

    Raises:
        OptionError: naming the flag, the variable or the key, what it says, and what is allowed.
    """
    given = _read_flags(arguments)
    file = FileContent()

    def found(option: Option[Any]) -> Written:
        variables = (Written(name, environment[name]) for name in option.variables if environment.get(name))
        default = Written(DEFAULT, option.default)
        return given.get(option) or next(variables, None) or file.values.get(option.key, default)

    path = found(next(option for option in OPTIONS if option.field == "config_file")).text
    if path:
        # Only where there is a file is it worth the time to load what decodes it.
        from _nvplug.config.file import read_file  # noqa: PLC0415

        file = read_file(path)
    for option in INERT:
        _value(option, found(option))
    written = {option.field: found(option) for option in OPTIONS}
    values = {option.field: _value(option, written[option.field]) for option in OPTIONS}
    values["dev_root"] = values["dev_root"] or values["driver_root"]
    origins = {field: each.origin for field, each in written.items()}
    return Settings(Config(**values, **file.sections), MappingProxyType({**origins, **file.origins}), file)


T = TypeVar("T")


def _value(option: Option[T], written: Written) -> T:
    try:
        return option.kind.parse(written.text)
    except ValueError as error:
        raise OptionError(
            f"{written.origin} is {written.text!r}: {error}", remedy=f"correct or remove {written.origin}"
        ) from None


def _read_flags(arguments: Sequence[str]) -> Mapping[Option[Any], Written]:
    known = {flag: option for option in (*OPTIONS, *INERT) for flag in option.flags}
    given: dict[Option[Any], Written] = {}
    words = iter(arguments)
    for word in words:
        spelling, equals, text = word.partition("=")
        name = spelling.removeprefix("-").removeprefix("-")
        if word in {"-", "--"} or name == spelling:
            _refuse_words([word, *words])
            break
        if name not in known:
            raise OptionError(f"there is no flag {spelling!r}", remedy=_nearest_flag(name, known))
        option = known[name]
        if not equals:
            text = "true" if option.kind.is_switch else _next_word(name, words)
        if option.kind.is_list and option in given:
            text = f"{given[option].text},{text}"
        given[option] = Written(f"--{name}", text)
    return given


def _next_word(name: str, words: Iterator[str]) -> str:
    for word in words:
        return word
    raise OptionError(f"--{name} needs a value", remedy=f"write --{name}=VALUE")


def _refuse_words(words: Sequence[str]) -> None:
    """Refuses what is left after the flags; ``--`` alone is their end."""
    extra = words[1:] if words[0] == "--" else words
    if not extra:
        return
    raise OptionError(
        f"{extra[0]!r} is not a flag",
        remedy="remove it; the value of a switch stands behind an equals sign, as in --pass-device-specs=false",
    )


def _nearest_flag(name: str, flags: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, flags, n=1)
    return f"did you mean --{near[0]}?" if near else "see nvplug run --help"
