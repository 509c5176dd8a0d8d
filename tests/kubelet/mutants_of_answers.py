"""The faults that are in what the kubelet is told: device lists, and the answers about devices."""

from __future__ import annotations

from kubelet.mutant import CONTROL, Edit, Fall, Mutant

__all__ = ["MUTANTS_OF_ANSWERS"]

_CLIENT = "_nvplug/kubelet/client.py"
_REGISTRAR = "_nvplug/kubelet/registrar.py"
_SERVER = "_nvplug/kubelet/server.py"
_WIRE = "_nvplug/kubelet/wire.py"

_ENDPOINT = "        endpoint = Endpoint(path, self._listing, self)\n"

MUTANTS_OF_ANSWERS = (
    # --- the list
    Mutant(
        "a broken device is called healthy",
        "Pods go on being given it.",
        (Edit(_WIRE, "health=HEALTHY if healthy else UNHEALTHY", "health=HEALTHY"),),
        (Fall("devices::a_device_breaks_and_comes_back", "await kubelet.await_allocatable(GPU, 7)"),),
    ),
    Mutant(
        "a broken device is left out",
        "It leaves the list, and with it the node's capacity.",
        (
            Edit(
                _WIRE,
                "        for device in devices:\n",
                "        for device in (each for each in devices if each.healthy):\n",
            ),
        ),
        (Fall("devices::a_device_breaks_and_comes_back", "assert (await kubelet.status()).capacity == {GPU: 8}"),),
    ),
    Mutant(
        "a device never recovers",
        "A list with more healthy devices than the last is not sent.",
        (
            Edit(
                _REGISTRAR,
                "            if listing is not None:\n                self._listing = listing\n",
                "            before = sum(device.healthy for device in self._listing.resource.devices)\n"
                "            if listing is not None and sum(d.healthy for d in listing.resource.devices) <= before:\n"
                "                self._listing = listing\n",
            ),
        ),
        (Fall("devices::a_device_breaks_and_comes_back", "await kubelet.await_allocatable(GPU, 8)"),),
    ),
    Mutant(
        "a long list is refused",
        "A megabyte is thought to be enough.",
        (Edit(_WIRE, "LIST_LIMIT = (4 << 20) - (64 << 10)\n", "LIST_LIMIT = 1 << 20\n"),),
        (Fall("devices::sixty_thousand_devices", "within=30"),),
    ),
    Mutant(
        "a long list comes in parts",
        "To the kubelet each is a whole list, and the last one counts.",
        (
            Edit(
                _SERVER,
                "                await stream.send_message(listing)\n",
                "                end = listing.encoded.find(listing.encoded[:8], 1 << 20)\n"
                "                if end < 0:\n"
                "                    await stream.send_message(listing)\n"
                "                else:\n"
                "                    await stream.send_message(Listing(listing.encoded[:end], listing.resource))\n"
                "                    await stream.send_message(Listing(listing.encoded[end:], listing.resource))\n",
            ),
        ),
        (Fall("devices::sixty_thousand_devices", "within=30"),),
    ),
    Mutant(
        "NUMA nodes are not sent",
        "The kubelet cannot keep a pod on one.",
        (Edit(_WIRE, "    topology = None if numa is None else", "    topology = None if True else"),),
        (Fall("devices::topology_hints", "assert set(hints[GPU] or ()) == {one, other_one, both}"),),
        quick=True,
    ),
    Mutant(
        "every device is on NUMA node -1",
        "What sysfs says of a machine without NUMA is passed on.",
        (Edit(_WIRE, "NumaNode(id=numa)", "NumaNode(id=-1)"),),
        (Fall("devices::topology_hints", "assert set(hints[GPU] or ()) == {one, other_one, both}"),),
    ),
    Mutant(
        "devices have names of our own",
        "Not the GPUs' UUIDs, which the plugin before used, which containers are given, and which pods hold. This is"
        " below much: whatever compares devices falls.",
        (
            Edit(_WIRE, "Device(id=device_id,", 'Device(id=f"gpu/{device_id}",'),
            Edit(
                _REGISTRAR,
                "        resource = self._resource()\n        try:\n            devices = chosen",
                "        resource = self._resource()\n"
                '        ids = [each.removeprefix("gpu/") for each in ids]\n'
                "        try:\n            devices = chosen",
            ),
        ),
        (
            Fall("several::migration_from_another_plugin[False]", "assert {*rest.device_ids[GPU]} =="),
            Fall("several::migration_from_another_plugin[True]", "assert {*rest.device_ids[GPU]} =="),
        ),
        also=CONTROL[1:6],
    ),
    # --- the answers
    Mutant(
        "the environment is lost",
        "A container is told nothing of its GPUs.",
        (Edit(_WIRE, "envs=dict(edits.environment)", "envs={}"),),
        (
            Fall("devices::options_arrive_whole", "assert container.envs =="),
            Fall("several::two_resources_at_once", "assert set(container.envs) =="),
            Fall("several::migration_from_another_plugin[False]", "assert set(rest.envs) =="),
        ),
        also=("restarts::pods_keep_their_gpus_over_restarts",),
    ),
    Mutant(
        "the environment is spelled wrong",
        "Ids are set apart by semicolons.",
        (
            Edit(
                _WIRE,
                "envs=dict(edits.environment)",
                'envs={name: value.replace(",", ";") for name, value in edits.environment.items()}',
            ),
        ),
        (Fall("devices::options_arrive_whole", "assert container.envs =="),),
        also=("restarts::pods_keep_their_gpus_over_restarts",),
    ),
    Mutant(
        "device nodes are lost",
        "A container is not let near its GPUs.",
        (Edit(_WIRE, "for node in edits.device_nodes\n", "for node in edits.device_nodes[:0]\n"),),
        (Fall("devices::options_arrive_whole", "assert set(container.device_nodes) =="),),
    ),
    Mutant(
        "an annotation too many",
        "What nobody asked for is handed to the runtime.",
        (
            Edit(
                _WIRE,
                "annotations=dict(edits.annotations)",
                'annotations={**edits.annotations, "nvidia.com/by": "nvplug"}',
            ),
        ),
        (Fall("devices::options_arrive_whole", "assert (container.mounts, container.annotations,"),),
    ),
    Mutant(
        "mounts are lost",
        "What NVIDIA's runtime is told by mounts, and the driver's files.",
        (Edit(_WIRE, "for mount in edits.mounts\n", "for mount in edits.mounts[:0]\n"),),
        (
            Fall("strategies::an_answer_arrives_whole[volume-mounts]", "assert {mount for mount in container.mounts"),
            Fall("strategies::an_answer_arrives_whole[direct]", "assert ({*container.mounts} > told,"),
        ),
    ),
    Mutant(
        "mounts can be written",
        "A container changes the driver of its node.",
        (Edit(_WIRE, "read_only=mount.read_only", "read_only=False"),),
        (Fall("strategies::an_answer_arrives_whole[direct]", "assert {mount for mount in container.mounts"),),
    ),
    Mutant(
        "CDI names are lost",
        "A container is given nothing, where they are all that it is given by.",
        (Edit(_WIRE, "for name in edits.cdi_devices]", "for name in edits.cdi_devices[:0]]"),),
        (Fall("strategies::an_answer_arrives_whole[cdi-cri]", "assert {*container.cdi_devices} =="),),
    ),
    Mutant(
        "annotations are lost",
        "The same, for runtimes that are told by these.",
        (Edit(_WIRE, "annotations=dict(edits.annotations)", "annotations={}"),),
        (Fall("strategies::an_answer_arrives_whole[cdi-annotations]", "assert container.annotations =="),),
    ),
    Mutant(
        "preferences are not offered",
        "The kubelet is told not to ask for them.",
        (Edit(_CLIENT, "get_preferred_allocation_available=True", "get_preferred_allocation_available=False"),),
        (Fall("devices::preferences_are_asked_for_and_obeyed", "assert [pod"),),
    ),
    Mutant(
        "preferences are empty",
        "The kubelet asks, and is left to chance.",
        (
            Edit(
                _REGISTRAR,
                "        return preferred(self._resource(), available, required, size, self._plan.value)\n",
                "        return ()\n",
            ),
        ),
        (Fall("devices::preferences_are_asked_for_and_obeyed", "assert [pod"),),
    ),
    Mutant(
        "preferences come in index order",
        "Nothing is made of what is known of the links: a pod's GPUs have no NVLinks to each other.",
        (Edit(_REGISTRAR, "available, required, size, self._plan.value)", "available, required, size)"),),
        (Fall("devices::preferences_are_asked_for_and_obeyed", "assert [pod"),),
    ),
    Mutant(
        "books are kept of what was allotted",
        "A device is refused to whoever comes second. The kubelet gives an init container's devices to the main one,"
        " and tells nobody when a pod has ended.",
        (
            Edit(
                _REGISTRAR,
                "        self._publish(Allocated(",
                '        given = self.__dict__.setdefault("given", set())\n'
                "        if not given.isdisjoint(ids):\n"
                '            raise UnusableDeviceError("allotted already", remedy="none")\n'
                "        given.update(ids)\n"
                "        self._publish(Allocated(",
            ),
        ),
        (Fall("devices::an_init_containers_device_is_used_again", "await kubelet.admit("),),
    ),
    Mutant(
        "devices change places",
        "After a second registration an id stands for another GPU: a new pod is given what an old one holds.",
        (
            Edit(
                _REGISTRAR,
                _ENDPOINT,
                '        self.__dict__["lives"] = self.__dict__.get("lives", 0) + 1\n' + _ENDPOINT,
            ),
            Edit(
                _REGISTRAR,
                "        self._publish(Allocated(",
                '        if self.__dict__["lives"] > 1:\n'
                "            places = resource.devices\n"
                "            devices = tuple(places[(places.index(each) + 1) % len(places)] for each in devices)\n"
                "        self._publish(Allocated(",
            ),
        ),
        (Fall("restarts::pods_keep_their_gpus_over_restarts", "assert {*rest.envs["),),
    ),
)
