"""Packs what PyInstaller found into one static executable: the part of build.spec that is more than a list.

The executable is launcher.c, with everything else in it as its payload. See there for what happens at start, and why
PyInstaller's own bootloader is not used.
"""

from __future__ import annotations

import importlib.util
import io
import json
import marshal
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["Unsuitable", "check_python", "make"]

HERE: Final = Path(__file__).parent

FIRST_FD: Final = 300
"""The descriptor of the first unpacked file. Above any that a parent is likely to hand down, and below the usual limit
of open files, 1024. What is open there in spite of that is closed."""

MACHINES: Final = ("x86_64", "aarch64")

# What libnvidia-ml.so.1 needs, whether or not Python does: found in the process by their sonames, they are never
# searched for on the host, whose glibc is another. The last is what glibc itself loads to end a thread.
FOR_THE_DRIVER: Final = ("libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libgcc_s.so.1")

# Of about 120 encodings, those that Python needs itself: the file systems', zipimport's, and of host names.
ENCODINGS: Final = re.compile(r"encodings(\.(aliases|ascii|cp437|idna|latin_1|punycode|utf_8|utf_16\w*|utf_32\w*))?")

# What Python and boot.py need before boot.py has made modules importable.
EARLY: Final = re.compile(r"__future__|_boot|_index|encodings(\..*)?")

_RECORD: Final = struct.Struct("<40sII")


class Unsuitable(SystemExit):
    """This machine cannot build the executable; the message says what is missing, and how to get it."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"make binary: {problem}; {remedy}")


def check_python() -> None:
    """Checks for all that the build needs, before it takes its time.

    Raises:
        Unsuitable: something is missing.
    """
    this = f"{sys.executable}, Python {platform.python_version()}"
    other = "or choose another Python (make binary PYTHON=...)"
    if sys.platform != "linux" or platform.machine() not in MACHINES or platform.libc_ver()[0] != "glibc":
        raise Unsuitable(
            f"this is {sys.platform} on {platform.machine()} with {platform.libc_ver()[0] or 'another C library'}",
            f"build on Linux with glibc, on {' or '.join(MACHINES)}",
        )
    if not sysconfig.get_config_var("Py_ENABLE_SHARED"):
        raise Unsuitable(
            f"{this} has no shared library",
            f"build Python with --enable-shared, on Debian apt-get install libpython3-dev, {other}",
        )
    try:
        _libpython()
    except FileNotFoundError as error:
        raise Unsuitable(
            f"{this}: its shared library {error} is missing", f"on Debian apt-get install libpython3-dev, {other}"
        ) from None
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise Unsuitable(
            f"{this} has no Python.h in {sysconfig.get_path('include')}",
            f"on Debian apt-get install libpython3-dev, {other}",
        )
    for tool, package in (("cc", "gcc libc6-dev"), ("strip", "binutils"), ("readelf", "binutils")):
        if not shutil.which(_tool(tool)[0]):
            raise Unsuitable(f"there is no {_tool(tool)[0]}", f"on Debian apt-get install {package}")


@dataclass(frozen=True, slots=True)
class _File:
    """One file of the payload, with the name that /proc/PID/maps will show."""

    name: str
    content: bytes


@dataclass(frozen=True, slots=True)
class _Code:
    """A compiled module: its path without a suffix, and its code as marshal writes it."""

    place: str
    is_package: bool
    content: bytes


def make(
    output: Path,
    work: Path,
    *,
    modules: Mapping[str, Path],
    generated: Mapping[str, str],
    libraries: Mapping[str, Path],
    extensions: Mapping[str, Path],
) -> None:
    """Writes the executable.

    Args:
        output: its path.
        work: a directory for what is made on the way.
        modules: the source of each module in Python, by its full name.
        generated: the source of modules that are not, or not so, in a file.
        libraries: shared libraries that extension modules or Python need, by soname. glibc's are added here.
        extensions: extension modules, by full name.

    Raises:
        Unsuitable: a library is needed that is nowhere.
    """
    work.mkdir(parents=True, exist_ok=True)
    libraries = _closed({**libraries, _libpython().name: _libpython()}, extensions.values())
    loader = _loader()
    names = sorted(extensions)
    first_module = FIRST_FD + 2 + len(libraries)
    blob = first_module + len(names)
    archive = blob + 1
    descriptors = {name: first_module + index for index, name in enumerate(names)}

    codes = _compiled(modules, generated)
    content, places, written = _blob(
        {name: code for name, code in codes.items() if not EARLY.fullmatch(name)}, _written(modules)
    )
    index = f"EXTENSIONS = {descriptors!r}\nMODULES = {blob}\nPLACES = {places!r}\nCOMPILED = {written!r}\n"
    early = {name: code for name, code in codes.items() if EARLY.fullmatch(name)}
    early["_index"] = _compile("_index", index.encode(), is_package=False)

    defines = [f"-DFIRST_FD={FIRST_FD}", f"-DFIRST_MODULE={first_module}", f"-DARCHIVE={archive}"]
    program = _link_start(work, libraries, FIRST_FD + 2, defines)
    files = [
        _File(loader.name, _stripped(loader, work)),
        _File("nvplug", _stripped(program, work)),
        *(_File(soname, _stripped(path, work)) for soname, path in libraries.items()),
        *(_File(name, _stripped(extensions[name], work)) for name in names),
        _File("modules", content),
        _File("archive", _archive(early)),
    ]
    payload = work / "payload"
    payload.write_bytes(_payload(files))
    output.parent.mkdir(parents=True, exist_ok=True)
    executable = work / "nvplug"
    _run(
        *_tool("cc"),
        *("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-ffreestanding", "-fno-stack-protector", "-fno-pie"),
        # Or the compiler makes of the loop in memcpy a call of memcpy.
        *("-fno-tree-loop-distribute-patterns", "-static", "-nostdlib", "-no-pie", "-s"),
        *("-Wl,--build-id=none", "-Wl,-z,noexecstack", "-Wl,-z,separate-code", f'-DPAYLOAD="{payload}"', *defines),
        *("-o", str(executable), str(HERE / "launcher.c")),
    )
    executable.chmod(0o755)
    executable.replace(output)
    print(f"{output}: {output.stat().st_size} bytes, of {sum(len(file.content) for file in files)} unpacked")
    for file in sorted(files, key=lambda file: -len(file.content))[:8]:
        print(f"  {len(file.content):9} {file.name}")


# --- libraries


def _libpython() -> Path:
    """Python's shared library.

    Raises:
        FileNotFoundError: it is not where it should be; its argument is the name.
    """
    name = str(sysconfig.get_config_var("INSTSONAME"))
    for directory in (sysconfig.get_config_var("LIBDIR"), f"/usr/lib/{platform.machine()}-linux-gnu"):
        path = Path(str(directory), name)
        if path.exists():
            return path
    raise FileNotFoundError(name)


def _loader() -> Path:
    """The dynamic loader that Python itself runs under."""
    found = re.search(
        r"interpreter: (/[^\]]+)",
        _run(*_tool("readelf"), "--program-headers", "--wide", os.path.realpath(sys.executable)),
    )
    assert found is not None, "Python is not dynamically linked, and yet it has a shared library"
    return Path(found[1])


def _closed(libraries: Mapping[str, Path], extensions: Iterable[Path]) -> dict[str, Path]:
    """The libraries together with all that any of them needs, so that nothing is ever taken from the host."""
    loader = _loader().name
    complete = dict.fromkeys(FOR_THE_DRIVER, Path()) | dict(libraries)
    queue = [(soname, "the driver's library") for soname in FOR_THE_DRIVER]
    queue += [(soname, path.name) for path in (*libraries.values(), *extensions) for soname in _needed(path)]
    found: set[str] = set(libraries)
    while queue:
        soname, by = queue.pop()
        if soname in found or soname == loader:
            continue
        path = Path(_run(*_tool("cc"), f"-print-file-name={soname}").strip())
        if not path.is_absolute():
            raise Unsuitable(f"{by} needs {soname}, which is nowhere", "install the package that has it")
        found.add(soname)
        complete[soname] = path
        queue += [(each, soname) for each in _needed(path)]
    return complete


def _needed(path: Path) -> list[str]:
    return re.findall(
        r"\(NEEDED\)\s+Shared library: \[(.+)\]", _run(*_tool("readelf"), "--dynamic", "--wide", str(path))
    )


def _stripped(path: Path, work: Path) -> bytes:
    copy = work / "stripped"
    shutil.copyfile(path, copy)
    options = ("--strip-unneeded", "--remove-section=.comment", "--remove-section=.note.gnu.build-id")
    _run(*_tool("strip"), *options, str(copy))
    return copy.read_bytes()


def _link_start(work: Path, libraries: Iterable[str], first: int, defines: Sequence[str]) -> Path:
    """Links start.c so that it loads the libraries, in this order, from descriptors."""
    stubs = []
    for index, soname in enumerate(libraries):
        # Empty: all that is wanted of it is its soname, which becomes the first NEEDED entries of the program.
        stub = work / f"stub-{soname}"
        option = f"-Wl,-soname,/proc/self/fd/{first + index}"
        _run(*_tool("cc"), "-shared", "-nostdlib", option, "-o", str(stub), "-x", "c", os.devnull)
        stubs.append(str(stub))
    program = work / "start"
    _run(
        *_tool("cc"),
        *("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIE", "-pie", f"-I{sysconfig.get_path('include')}"),
        *("-Wl,--build-id=none", "-Wl,--no-as-needed", *defines, "-o", str(program), str(HERE / "start.c"), *stubs),
        *("-Wl,--as-needed", str(_libpython()), f"-Wl,-rpath-link,{_libpython().parent}"),
    )
    return program


# --- modules


def _compiled(modules: Mapping[str, Path], generated: Mapping[str, str]) -> dict[str, _Code]:
    """All modules in Python, in order of their names."""
    sources = {name: (path.read_bytes(), path.name == "__init__.py") for name, path in modules.items()}
    sources |= {name: (text.encode(), name in sources and sources[name][1]) for name, text in generated.items()}
    return {name: _compile(name, source, is_package=package) for name, (source, package) in sorted(sources.items())}


def _compile(name: str, source: bytes, *, is_package: bool) -> _Code:
    place = name.replace(".", "/") + ("/__init__" if is_package else "")
    code = compile(source, f"{place}.py", "exec", dont_inherit=True, optimize=2)
    return _Code(place, is_package, marshal.dumps(code))


def _archive(codes: Mapping[str, _Code]) -> bytes:
    """Modules in a zip file without dates, as Python finds them by itself."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for code in codes.values():
            # An unchecked hash in place of the date of a source that is not there.
            content = importlib.util.MAGIC_NUMBER + struct.pack("<I8x", 1) + code.content
            archive.writestr(zipfile.ZipInfo(f"{code.place}.pyc"), content)
    return buffer.getvalue()


def _blob(
    codes: Mapping[str, _Code], texts: Iterable[str]
) -> tuple[bytes, dict[str, tuple[int, int, bool]], tuple[int, int]]:
    """Modules one behind the other, and at the end what the texts are compiled to.

    Not compressed by themselves: 5 MB more memory for as long as the program runs, and 50 ms less at each start.

    Returns:
        All of it; where each module is, how long it is and whether it is a package; and where the rest is.
    """
    content = bytearray()
    places = {}
    for name, code in codes.items():
        places[name] = (len(content), len(code.content), code.is_package)
        content += code.content
    written = marshal.dumps(
        {text: compile(text, "<generated>", "exec", dont_inherit=True, optimize=2) for text in texts}
    )
    return bytes(content + written), places, (len(content), len(written))


def _written(modules: Mapping[str, Path]) -> list[str]:
    """The text that dataclasses and attrs write, and have compiled, when these modules are imported.

    Those of the standard library are left out: some do more than define, and those that count are imported by others.
    """
    library = Path(sysconfig.get_path("stdlib"))
    ours = [name for name, path in modules.items() if library not in path.parents or "site-packages" in path.parts]
    output = _run(sys.executable, "-B", "-OO", str(HERE / "record.py"), *sorted(ours))
    texts: list[str] = json.loads(output)
    # Or they do it in another way than boot.py knows: nothing would break, and every start would take longer.
    for mark in ("__create_fn__", "attr_dict"):
        assert any(mark in text for text in texts), f"nobody compiles anything with {mark} any more"
    return sorted(texts)


# --- the payload


def _payload(files: Sequence[_File]) -> bytes:
    import lz4.block  # noqa: PLC0415  # check_python comes before what only this environment has

    records, contents = bytearray(struct.pack("<Q", len(files))), bytearray()
    for file in files:
        packed = lz4.block.compress(file.content, mode="high_compression", compression=12, store_size=False)
        if len(packed) >= len(file.content):
            packed = file.content
        records += _RECORD.pack(file.name.encode()[:39], len(file.content), len(packed))
        contents += packed
    return bytes(records + contents)


def _tool(name: str) -> list[str]:
    return shlex.split(os.environ.get(name.upper(), name))


def _run(*command: str) -> str:
    done = subprocess.run(command, check=False, text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(f"make binary: {shlex.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout
