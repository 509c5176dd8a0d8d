"""Faults of what nvplug makes of several resources, for the table of mutants."""

from __future__ import annotations

from kubelet.mutant import Edit, Fall, Mutant

__all__ = ["MUTANTS_OF_RESOURCES"]

_REGISTRAR = "_nvplug/kubelet/registrar.py"
_RESOURCES = "_nvplug/resources.py"
_SOCKETS = "_nvplug/kubelet/sockets.py"

MUTANTS_OF_RESOURCES = (
    Mutant(
        "every resource has the devices of the first",
        "The list is that of the node's first resource, whichever the kubelet watches.",
        (
            Edit(
                _REGISTRAR,
                "        return next(each for each in self._offer.value.resources if each.name == self._name)\n",
                "        return self._offer.value.resources[0]\n",
            ),
        ),
        (Fall("own_resources::two_resources_by_product", "async with two_resources("),),
    ),
    Mutant(
        "the trouble of one is the trouble of all",
        "When one socket is lost, every resource registers anew, and pods that start just then are refused.",
        (
            Edit(
                _SOCKETS,
                "                watch.on_change(what)\n",
                "                watch.on_change(what)\n"
                '                if watch.path.name != "kubelet.sock":\n'
                "                    for each in tuple(self._watches):\n"
                '                        if each is not watch and each.path.name != "kubelet.sock":\n'
                "                            each.on_change(what)\n",
            ),
        ),
        (Fall("own_resources::one_socket_deleted", 'assert socket_of(kubelet, "small") == kept'),),
    ),
    Mutant(
        "every edit is a list for everybody",
        "What an edit leaves alone is listed anew all the same.",
        (
            Edit(
                _REGISTRAR,
                "                    self._endpoint.listing.set(listing)\n",
                "                    self._endpoint.listing._value = None\n"
                "                    self._endpoint.listing.set(listing)\n",
            ),
        ),
        (Fall("own_resources::an_edit_of_one_resource", "if SMALL in line"),),
    ),
    Mutant(
        "the last device stays listed",
        "A resource that has lost its devices keeps the list that it had.",
        (
            Edit(
                _RESOURCES,
                "        resources.append(\n            Resource(\n                name,\n",
                "        if name not in shares:\n"
                "            devices = before[name].devices\n"
                "        resources.append(\n            Resource(\n                name,\n",
            ),
        ),
        (Fall("own_resources::whole_gpus_and_parts_of_them", "await kubelet.await_allocatable(SLICE, 0)"),),
    ),
)
