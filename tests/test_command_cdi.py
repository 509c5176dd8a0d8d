from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

import nvplug
from _nvplug.commands.cdi import main
from _nvplug.config import read_config
from _nvplug.container.cdi_document import decode


def test_the_document_of_this_node_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """As it would be written, and nothing else; GPUs on paper have one, too."""
    assert nvplug.main(["cdi", "--device-discovery-strategy=simulated:2xH100"]) == 0

    printed = capsys.readouterr()
    names = [device.name for device in decode(printed.out.encode()).devices]
    assert [name for name in names if not name.startswith("GPU-")] == ["0", "1", "all"]
    assert printed.out.endswith("}\n")
    assert printed.err == ""


def test_nodes_that_exist_are_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the root that the options name."""
    (tmp_path / "dev").mkdir()
    try:
        os.mknod(tmp_path / "dev/nvidia0", stat.S_IFCHR, os.makedev(195, 0))
    except PermissionError:
        pytest.skip("device nodes can only be made by root")
    arguments = ["--device-discovery-strategy=simulated:2xH100", f"--dev-root={tmp_path}"]

    assert nvplug.main(["cdi", *arguments]) == 0
    first, *_ = json.loads(capsys.readouterr().out)["devices"]
    (node,) = first["containerEdits"]["deviceNodes"]
    assert (node["path"], node["hostPath"], node["major"]) == ("/dev/nvidia0", f"{tmp_path}/dev/nvidia0", 195)


def test_without_gpus_that_could_be_described_it_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr, with what to do, and exit status 1."""
    config = read_config([], {})
    machine = tmp_path / "none.json"
    machine.write_text('{"machine": "2xH100", "count": 0}')
    driver = nvplug.driver_for(read_config([f"--device-discovery-strategy=simulated:{machine}"], {}))

    assert main(driver, config, root=str(tmp_path)) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("nvplug cdi: ")
    assert "; " in printed.err
