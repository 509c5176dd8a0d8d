from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from kubelet.build import GoError, build_judge
from needs import lacking

from _nvplug.config import OPTIONS
from _nvplug.config.model import Config

MANIFESTS: Final = sorted((Path(__file__).parents[2] / "deploy").glob("*.yaml"))

Judge = Callable[[Path], list[str]]


@pytest.fixture(scope="session")
def judge() -> Judge:
    """What an API server, or kubectl, would say against a manifest."""
    try:
        program = build_judge()
    except GoError as error:
        lacking(f"the API's own types cannot be had: {error}; {error.remedy}")

    def run(manifest: Path) -> list[str]:
        done = subprocess.run([program, manifest], check=False, text=True, capture_output=True)
        assert not done.stderr

        complaints = done.stdout.splitlines()

        assert done.returncode == int(bool(complaints))
        return complaints

    return run


def read(manifest: Path) -> dict[str, Any]:
    """The one object in it."""
    found: dict[str, Any] = yaml.safe_load(manifest.read_text())
    return found


def pod_of(manifest: Path) -> dict[str, Any]:
    """What its pods are made from."""
    pod: dict[str, Any] = read(manifest)["spec"]["template"]["spec"]
    return pod


def container_of(manifest: Path) -> dict[str, Any]:
    """The only one."""
    (container,) = pod_of(manifest)["containers"]
    assert isinstance(container, dict)
    return container


each = pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)


def test_there_are_two() -> None:
    """Of one name, so that applying one replaces the other and no node ever has both."""
    first, second = map(read, MANIFESTS)

    assert first["metadata"] == second["metadata"]
    assert first["spec"]["selector"] == second["spec"]["selector"]


@pytest.mark.conformance
@pytest.mark.slow
@each
def test_an_api_server_takes_it(manifest: Path, judge: Judge) -> None:
    """Strictly, by the validation of Kubernetes itself, and without a warning."""
    assert judge(manifest) == []


@pytest.mark.conformance
@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong", "named"),
    [
        (
            "periodSeconds: 60",
            "periodSecond: 60",
            'unknown field "spec.template.spec.containers[0].livenessProbe.periodSecond"',
        ),
        ("maxSurge: 0", "maxSurge: 1", "maxSurge: Invalid value: 1"),
        ("{name: memory, mountPath", "{name: memroy, mountPath", 'Not found: "memroy"'),
        ("type: Directory}", "type: Dir}", 'Unsupported value: "Dir"'),
        ("cpu: 10m", "cpu: ten", "quantities must match"),
        ("apps/v1", "apps/v2", 'no kind "DaemonSet" is registered'),
    ],
)
def test_the_judge_sees_what_is_wrong(right: str, wrong: str, named: str, judge: Judge, tmp_path: Path) -> None:
    """Or the test above would prove nothing."""
    spoilt = tmp_path / "spoilt.yaml"
    spoilt.write_text(MANIFESTS[0].read_text().replace(right, wrong))

    assert named in "\n".join(judge(spoilt))


@each
def test_two_incarnations_never_overlap(manifest: Path) -> None:
    """The old pod is gone before the new one is made: kubelets up to 1.36 mix up two plugins for one resource."""
    strategy = read(manifest)["spec"]["updateStrategy"]

    assert strategy["type"] == "RollingUpdate"
    assert strategy["rollingUpdate"]["maxSurge"] == 0


@each
def test_it_probes_what_a_restart_mends(manifest: Path) -> None:
    """And is ready when the kubelet watches; the probe gives up later than nvplug health does, to read what it says."""
    container = container_of(manifest)
    probes = [container[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")]

    assert [probe["exec"]["command"][2:] for probe in probes] == [[], [], ["--ready"]]
    for probe in probes:
        assert probe["exec"]["command"][:2] == ["nvplug", "health"]
        assert probe["timeoutSeconds"] > 5


@each
def test_it_asks_for_options_that_there_are(manifest: Path) -> None:
    """Each variable is one of nvplug's; so is the directory that the kubelet's socket is in."""
    known = {variable for option in OPTIONS for variable in option.variables} | {"RUNTIME_DIRECTORY"}
    container = container_of(manifest)
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}

    assert {variable["name"] for variable in container["env"]} <= known
    assert str(Config().kubelet_socket.parent) in mounted
    assert {variable["value"] for variable in container["env"] if variable["name"] == "RUNTIME_DIRECTORY"} <= mounted


@each
def test_it_sees_no_secrets_of_pods(manifest: Path) -> None:
    """Neither a token of its own nor, by a mount of /var/lib/kubelet for writing, those of others."""
    pod = pod_of(manifest)
    writable = {mount["mountPath"] for mount in container_of(manifest)["volumeMounts"] if not mount.get("readOnly")}

    assert pod["automountServiceAccountToken"] is False
    assert "/var/lib/kubelet" not in writable
