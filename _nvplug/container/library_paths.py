"""Where a library must be in a container so that a dynamic loader finds it that nobody has told of it.

Without NVIDIA's runtime or a hook of it nobody runs ldconfig. So a library must be mounted under each name that is
asked for, in a directory where the loader looks anyway: those that are built into it. Which ones depends on the image,
that is to say on its distribution, which nobody knows here. So those of both families get every library. Not chosen:

- LD_LIBRARY_PATH, which would take the place of the image's own;
- the container directory of Google's plugin alone, /usr/local/nvidia: images that are made from NVIDIA's have it in
  their LD_LIBRARY_PATH, and in others a script must set it;
- a file in /etc/ld.so.conf.d, which only ldconfig reads; and a cache of our own, mounted over the image's
  /etc/ld.so.cache, which would hide the image's libraries.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from typing import Final

from _nvplug.container.driver_files import DriverFile, DriverFiles

__all__ = ["LINKS", "library_paths", "stem_of"]

# Files that programs open by names that no library says of itself: name, and what it leads to.
LINKS: Final = (
    ("libcuda.so", "libcuda.so", "libcuda.so.1"),
    ("libnvidia-allocator.so", "gbm/nvidia-drm_gbm.so", "../libnvidia-allocator.so.1"),
    ("libnvidia-opticalflow.so", "libnvidia-opticalflow.so", "libnvidia-opticalflow.so.1"),
    ("libGLX_nvidia.so", "libGLX_indirect.so.0", "libGLX_nvidia.so.{}"),
)


def library_paths(files: DriverFiles, triplet: str) -> Iterator[tuple[str, str]]:
    """Where libraries are mounted: paths in a container, each with the file itself, below what was searched.

    Where the host has it they get all their names, in the other directory those that are asked for.

    Args:
        files: of the driver.
        triplet: of its machine, as in Debian's directories: ``x86_64-linux-gnu``.
    """
    for file in files.libraries:
        place, name = posixpath.split(file.path)
        asked = dict.fromkeys([*file.names, *(link for stem, link, _ in LINKS if stem == stem_of(file))])
        if posixpath.basename(place) == "vdpau":
            # Not the loader's business: libvdpau looks there.
            places = {place: [name, *asked]}
        else:
            ours, theirs = (f"/usr/lib/{triplet}", "/usr/lib64")
            if place in {"/usr/lib64", "/lib64"}:
                ours, theirs = place, ours
            elif place == f"/lib/{triplet}":
                ours = place
            places = {ours: [name, *asked], theirs: [*asked] or [name]}
        for where, names in places.items():
            for each in names:
                yield f"{where}/{each}", file.source


def stem_of(file: DriverFile) -> str:
    """The name of a library up to ``.so``, without its version."""
    name = posixpath.basename(file.path)
    return name[: name.find(".so") + 3]
