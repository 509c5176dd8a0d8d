"""What must turn the tests against the real kubelet red: small faults, put into a copy of the program.

Each fault is one that plugins have, or that a change of nvplug could bring. It names the tests that must fall because
of it, and where in them. A test that nothing fells proves nothing.
"""

from __future__ import annotations

from kubelet.build import VERSIONS
from kubelet.mutant import Edit, Fall, Mutant
from kubelet.mutants_of_answers import MUTANTS_OF_ANSWERS
from kubelet.mutants_of_resources import MUTANTS_OF_RESOURCES

__all__ = ["MUTANTS"]

_V36, _V37 = VERSIONS

_CLIENT = "_nvplug/kubelet/client.py"
_REGISTRAR = "_nvplug/kubelet/registrar.py"
_REGISTRATION = "_nvplug/kubelet/registration.py"
_SERVER = "_nvplug/kubelet/server.py"
_SOCKETS = "_nvplug/kubelet/sockets.py"

_GIVE_UP_AT_15_S = Edit(_CLIENT, "                await self._protocol.awake.wait()\n", "")

# A request in the queue of a kubelet that does not read.
_REGISTER_BLINDLY = Edit(_CLIENT, "            await protocol.spoke.wait()\n", "")

# Neither its connection is closed, nor is its stream reset: from 1.35 on either would end the kubelet's dial of us.
_LEAVE_REGISTER_RUNNING = (
    Edit(
        _CLIENT,
        "            await trio_asyncio.aio_as_trio(stub.register)(request)\n",
        "            task, replied = asyncio.get_event_loop().create_task(stub.register(request)), trio.Event()\n"
        "            task.add_done_callback(lambda _task: replied.set())\n"
        "            await replied.wait()\n"
        "            task.result()\n",
    ),
    Edit(_REGISTRAR, "        finally:\n            connection.close()\n", "        finally:\n            pass\n"),
)

_FORGET_WHAT_IS_UNANSWERED = Edit(
    _REGISTRATION, "    haunted = state.haunted or left_behind\n", "    haunted = state.haunted\n"
)

_POLLER_ALONE = Edit(
    _REGISTRATION,
    "    StreamEnded: _ended,\n    KubeletReplaced: _kubelet_replaced,\n    SocketLost: _lost,\n",
    "    KubeletReplaced: _kubelet_replaced,\n",
)

_ENDPOINT = "        endpoint = Endpoint(path, self._listing, self)\n"

MUTANTS = (
    # --- registering
    Mutant(
        "bind before connect",
        "The socket is bound first and the kubelet dialled then. A kubelet that starts empties its directory in"
        " between: crash restarts cost Registers that lead nowhere, and the time to notice.",
        (
            Edit(
                _REGISTRAR,
                "        self._dialling = trio.CancelScope()\n        self._nursery.start_soon(self._call_dial",
                "        if self._endpoint is None:\n"
                "            self._bind()\n"
                "        self._dialling = trio.CancelScope()\n        self._nursery.start_soon(self._call_dial",
            ),
            Edit(
                _REGISTRAR,
                "    def _announce(self) -> None:\n",
                "    def _announce(self) -> None:\n"
                "        if self._endpoint is None:\n"
                "            self._bind()\n"
                "        if self._endpoint is not None:\n"
                "            self._register()\n"
                "            if not self._endpoint.path.exists():\n"
                "                self._nursery.start_soon(self._notice)\n"
                "\n"
                "    async def _notice(self) -> None:\n"
                "        await trio.sleep(0.05)\n"
                "        self._inbox.send_nowait(SocketLost)\n"
                "\n"
                "    def _bind(self) -> None:\n",
            ),
            Edit(
                _REGISTRAR,
                "        self._nursery.start_soon(endpoint.serve)\n        self._register()\n",
                "        self._nursery.start_soon(endpoint.serve)\n",
            ),
        ),
        (Fall("restarts::fifty_restarts_in_a_row[crash]", "assert calls == 50"),),
    ),
    Mutant(
        "a fresh name after a Register without an answer",
        "A frozen kubelet is given up after 15 s, and what comes next has another socket: up to 1.36 the first Register"
        " fails late and takes the client of the second along. nvplug would end the first, and make good what it did"
        " nevertheless: both are taken away, too.",
        (
            _GIVE_UP_AT_15_S,
            Edit(
                _REGISTRATION,
                "    Phase.HOLDING: {**_SERVED, Due: _redial},\n",
                "    Phase.HOLDING: {**_SERVED, Due: lambda state, _, at: _retire(state, at, resume=at.now)},\n",
            ),
            *_LEAVE_REGISTER_RUNNING,
            _FORGET_WHAT_IS_UNANSWERED,
        ),
        (
            Fall(
                "standstill::the_kubelet_is_frozen_during_register[Got registration request-0]",
                "await stop(kubelet, frozen)",
                (_V36,),
            ),
        ),
    ),
    Mutant(
        "a frozen kubelet is given up",
        "After 15 s the Register is repeated, though the kubelet is only frozen and takes both in hand later. From 1.37"
        " on the second unseats the client of the first, whose stream is read on: nobody sees it end. So that the"
        " second is surely in time, it does not wait for a sign of the kubelet's life either.",
        (_GIVE_UP_AT_15_S, _REGISTER_BLINDLY),
        (
            Fall(
                "standstill::the_kubelet_is_frozen_during_register[Connected to new client-0]",
                "await stop(kubelet, frozen)",
                (_V37,),
            ),
        ),
    ),
    Mutant(
        "no fault: a lost Register runs on",
        "What is taken away from the next one, taken away alone: a Register whose socket has vanished is not ended. It"
        " fails late and takes the next client along, and nvplug, which remembers it, registers once more.",
        _LEAVE_REGISTER_RUNNING,
        (),
        spared=("standstill::our_socket_is_deleted_while_the_kubelet_is_frozen",),
    ),
    Mutant(
        "a lost Register is forgotten",
        "A socket that vanished under a pending Register is replaced, and no thought is given to what becomes of the"
        " Register, which is not ended either. Up to 1.36 the kubelet forgets our client when it fails.",
        (*_LEAVE_REGISTER_RUNNING, _FORGET_WHAT_IS_UNANSWERED),
        (
            Fall(
                "standstill::our_socket_is_deleted_while_the_kubelet_is_frozen",
                "await stop(kubelet, plugin)",
                (_V36,),
            ),
        ),
    ),
    Mutant(
        "a socket path is used again",
        "The name is the same in every life. From 1.37 on a kubelet knows clients by it.",
        (
            Edit(_SOCKETS, "-{secrets.token_hex(4)}.sock", ".sock"),
            Edit(_REGISTRAR, _ENDPOINT, "        path.unlink(missing_ok=True)\n" + _ENDPOINT),
        ),
        (
            Fall("restarts::our_socket_is_deleted", "assert new != lost"),
            Fall("several::rolling_upgrade[first ends, second starts]", "assert new != old"),
        ),
        also=("restarts::nvplug_is_killed_and_starts_again",),
        quick=True,
    ),
    Mutant(
        "two endpoints overlap",
        "The next endpoint is registered before the last one is retired. Up to 1.36 the end of the old stream"
        " disconnects the new client, and nvplug has to start over. From 1.37 on there is no harm in it.",
        (
            Edit(
                _REGISTRAR,
                "        # Shielded: a socket once bound is always removed.\n"
                "        with trio.CancelScope(shield=True):\n"
                "            await self._abandon(endpoint)\n"
                "        self._inbox.send_nowait(Retired)\n",
                "        unwatch, self._unwatch_socket = self._unwatch_socket, None\n"
                "        if unwatch is not None:\n"
                "            unwatch()\n"
                "        self._inbox.send_nowait(Retired)\n"
                "        with trio.CancelScope(shield=True):\n"
                "            await trio.sleep(0.3)\n"
                "            await endpoint.retire()\n",
            ),
        ),
        (Fall("restarts::our_socket_is_deleted", "stays_allocatable", (_V36,)),),
        quick=True,
    ),
    Mutant(
        "a client is registered twice",
        "Half a second after its stream began the resource is registered anew, for no reason.",
        (
            Edit(_REGISTRATION, "LATE_FAILURE_WITHIN = 12.0\n", "LATE_FAILURE_WITHIN = 0.5\n"),
            Edit(_REGISTRATION, "    haunted: bool = False\n", "    haunted: bool = True\n"),
        ),
        (Fall("devices::first_registration_makes_the_gpus_allocatable", "stays_allocatable"),),
    ),
    # --- noticing
    Mutant(
        "a kubelet's restart is forgotten",
        "nvplug registers once in its life.",
        (
            Edit(_REGISTRATION, "phase=Phase.WAITING, due=state.resume,", "phase=Phase.WAITING, due=math.inf,"),
            Edit(
                _REGISTRATION,
                "    Phase.WAITING: {Due: _dial, KubeletReplaced: _forget_kubelet},\n",
                "    Phase.WAITING: {Due: _dial},\n",
            ),
            Edit(
                _REGISTRATION,
                "    Phase.RETIRING: {Retired: _retired, KubeletReplaced: _forget_kubelet_meanwhile},\n",
                "    Phase.RETIRING: {Retired: _retired},\n",
            ),
        ),
        (
            Fall("restarts::pods_keep_their_gpus_over_restarts", "await kubelet.await_allocatable(GPU, 8)"),
            Fall("restarts::fifty_restarts_in_a_row[restart]", "within=BACK"),
            Fall("restarts::fifty_restarts_in_a_row[crash]", "within=BACK"),
            Fall("several::two_resources_at_once", "await kubelet.await_allocatable(GPU, 8)"),
            Fall("standstill::nvplug_is_stopped_and_goes_on", "await kubelet.await_allocatable(GPU, 8)"),
        ),
    ),
    Mutant(
        "a stream's end is overlooked",
        "Only a new kubelet.sock, or the loss of our own, is a reason to register. Up to 1.36 the end of another plugin"
        " for the same resource ends our stream, while both sockets stay. From 1.37 on it does not.",
        (Edit(_REGISTRATION, "    StreamEnded: _ended,\n", ""),),
        (
            Fall(
                "several::rolling_upgrade[second starts, first ends]", "await kubelet.await_allocatable(GPU, 8", (_V36,)
            ),
            Fall("several::rolling_upgrade[both for a while]", "await kubelet.await_allocatable(GPU, 8", (_V36,)),
            Fall("several::migration_from_another_plugin[True]", "await kubelet.await_allocatable(GPU, 8", (_V36,)),
        ),
    ),
    Mutant(
        "it is slow after a kubelet's restart",
        "Every stream's end is followed by a pause, and a new kubelet does not cut it short.",
        (
            Edit(_REGISTRATION, "SHORT_STREAM_DELAY = 0.1\n", "SHORT_STREAM_DELAY = 4.0\n"),
            Edit(
                _REGISTRATION,
                "    Phase.WAITING: {Due: _dial, KubeletReplaced: _forget_kubelet},\n",
                "    Phase.WAITING: {Due: _dial},\n",
            ),
            Edit(
                _REGISTRATION,
                "    Phase.RETIRING: {Retired: _retired, KubeletReplaced: _forget_kubelet_meanwhile},\n",
                "    Phase.RETIRING: {Retired: _retired},\n",
            ),
        ),
        (
            Fall("restarts::fifty_restarts_in_a_row[restart]", "within=BACK"),
            Fall("restarts::fifty_restarts_in_a_row[crash]", "within=BACK"),
            Fall("restarts::our_socket_is_deleted", "with trio.fail_after(BACK)"),
            Fall("restarts::the_directory_is_replaced", "assert reached.since_start < BACK"),
        ),
    ),
    Mutant(
        "no fault: the poller alone",
        "What is taken away from the next one, taken away alone: neither the end of a stream nor the loss of our socket"
        " is looked at. The identity of kubelet.sock suffices.",
        (_POLLER_ALONE,),
        (),
        spared=("restarts::fifty_restarts_in_a_row[crash]",),
    ),
    Mutant(
        "device and inode are all that is compared",
        "A new kubelet.sock with the inode number of the old one passes for it. The end of the stream and the loss of"
        " our socket tell of a new kubelet, too, so that this cannot be seen alone: the poller has to do without them.",
        (
            _POLLER_ALONE,
            Edit(
                _SOCKETS,
                "return Identity(found.st_dev, found.st_ino, found.st_ctime_ns)",
                "return Identity(found.st_dev, found.st_ino, 0)",
            ),
        ),
        (Fall("restarts::fifty_restarts_in_a_row[crash]", "within=BACK"),),
        also=("restarts::pods_keep_their_gpus_over_restarts", "several::two_resources_at_once"),
        needs_old_inodes=True,
    ),
    Mutant(
        "the loss of our socket goes unnoticed",
        "Nobody looks whether our own socket is still there.",
        (
            Edit(
                _REGISTRAR,
                "self._poller.watch(path, lambda _change: self._inbox.send_nowait(SocketLost))",
                "None",
            ),
        ),
        (Fall("restarts::our_socket_is_deleted", "with trio.fail_after(BACK)"),),
        quick=True,
    ),
    Mutant(
        "the directory is held on to",
        "It is opened once, and our sockets are made in that one, whatever is at its path now.",
        (
            Edit(
                _REGISTRAR,
                _ENDPOINT,
                "        import os\n"
                '        if not hasattr(_Registrar, "_held"):\n'
                "            _Registrar._held = os.open(path.parent, os.O_PATH)\n"
                '        path = type(path)(f"/proc/self/fd/{_Registrar._held}") / path.name\n' + _ENDPOINT,
            ),
        ),
        (Fall("restarts::the_directory_is_replaced", "await kubelet.await_allocatable(GPU, 8)"),),
    ),
    Mutant(
        "the directory is taken for granted",
        "nvplug ends where there is none, instead of waiting for a kubelet that makes it.",
        (
            Edit(
                _REGISTRAR,
                '    clear_leftovers(directory, "nvplug-*.sock",',
                '    directory.stat()\n    clear_leftovers(directory, "nvplug-*.sock",',
            ),
        ),
        (Fall("devices::nvplug_waits_for_the_kubelet", "await kubelet.await_allocatable(GPU, 8)"),),
    ),
    Mutant(
        "a standstill is taken for the end",
        "Two looks that are far apart mean that the process was stopped, and it ends.",
        (
            Edit(
                _SOCKETS,
                "                if await doorbell.rings_within(BRISK if brisk else quiet):\n",
                "                looked = trio.current_time()\n"
                "                rang = await doorbell.rings_within(BRISK if brisk else quiet)\n"
                "                if trio.current_time() - looked > quiet + 2.0:\n"
                '                    raise OSError("stood still")\n'
                "                if rang:\n",
            ),
        ),
        (Fall("standstill::nvplug_is_stopped_and_goes_on", "stays_allocatable"),),
    ),
    # --- ending and beginning
    Mutant(
        "an empty list is sent at the end",
        "The node's capacity becomes 0 with every restart of nvplug.",
        (
            Edit(
                _SERVER,
                "        self.listing.set(None)\n",
                "        if self.listing.value is not None:\n"
                '            self.listing.set(Listing(b"", self.listing.value.resource))\n'
                "            with trio.CancelScope(shield=True):\n"
                "                await trio.sleep(0.05)\n"
                "        self.listing.set(None)\n",
            ),
        ),
        (
            Fall(
                "devices::first_registration_makes_the_gpus_allocatable",
                "assert (await kubelet.status()).capacity == {GPU: 8}",
            ),
        ),
    ),
    Mutant(
        "its socket is left behind",
        "Every test sees that: none of them lets nvplug end with a socket left. So nothing is spared.",
        (Edit(_SERVER, "            self.path.unlink(missing_ok=True)\n", "            pass\n"),),
        (Fall("devices::first_registration_makes_the_gpus_allocatable", "running(kdm, directory) as kubelet"),),
        spares=False,
    ),
    Mutant(
        "what a killed nvplug left behind stays",
        "Dead sockets gather in the kubelet's directory for as long as the kubelet lives.",
        (Edit(_REGISTRAR, '    clear_leftovers(directory, "nvplug-*.sock",', '    ("nvplug-*.sock",'),),
        (Fall("restarts::nvplug_is_killed_and_starts_again", "(alive,) = sockets(kubelet)"),),
    ),
    Mutant(
        "it stands back behind another plugin",
        "nvplug does not register while another plugin's socket is alive, be it an older nvplug's.",
        (
            Edit(
                _SOCKETS,
                "    if living:\n",
                '    if living:\n        raise OSError("another plugin is there")\n    if living:\n',
            ),
        ),
        (
            Fall("several::rolling_upgrade[second starts, first ends]", "await kubelet.await_allocatable(GPU, 8)"),
            Fall("several::rolling_upgrade[both for a while]", "await kubelet.await_allocatable(GPU, 8)"),
            Fall("several::migration_from_another_plugin[True]", "within=BACK"),
        ),
        also=("several::two_resources_at_once",),
    ),
    Mutant(
        "sockets of other plugins are cleared away",
        "Before it makes its socket nvplug empties the directory, as the kubelet does.",
        (
            Edit(
                _REGISTRAR,
                _ENDPOINT,
                '        for each in path.parent.glob("nvidia*.sock"):\n            each.unlink()\n' + _ENDPOINT,
            ),
        ),
        (Fall("several::two_resources_at_once", "in sockets(kubelet)"),),
    ),
    *MUTANTS_OF_ANSWERS,
    *MUTANTS_OF_RESOURCES,
)
