"""The unit and the manifests of docs/deploy: they parse, and what they run exists with these flags."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsv4_repro.repro.cli import build
from dsv4_repro.repro.serving.exporter import parse_listen

DEPLOY = Path(__file__).resolve().parents[2] / "docs" / "deploy"
MANIFESTS = sorted(DEPLOY.glob("*.yaml"))


class _Unit(configparser.ConfigParser):
    def optionxform(self, optionstr: str) -> str:
        return optionstr


def _check_command(words: list[str]) -> None:
    """A command line of ours: the verb, and each flag of it, are those of the program."""
    assert words[0].rpartition("/")[2] == "dsv4-repro"
    verb = build().commands[words[1]]
    known = {text for parameter in verb.params for text in (*parameter.opts, *parameter.secondary_opts)}
    assert [word for word in words[2:] if word.startswith("--") and word not in known] == []
    verb.make_context(words[1], words[2:])


def test_the_unit() -> None:
    unit = _Unit(strict=True, interpolation=None)
    unit.read_string((DEPLOY / "dsv4-repro-watch.service").read_text(encoding="utf-8"))
    assert set(unit) == {"DEFAULT", "Unit", "Service", "Install"}
    service = unit["Service"]
    words = shlex.split(service["ExecStart"])
    _check_command(words)
    assert words[1] == "watch"
    assert "--attach" not in words
    assert service["CapabilityBoundingSet"] == ""
    assert service["NoNewPrivileges"] == "yes"
    assert service["KillMode"] == "mixed"
    # The folder that it writes to is the one that systemd makes for it.
    assert words[words.index("--out") + 1] == "/var/lib/" + service["StateDirectory"]
    assert service["WorkingDirectory"] == "/var/lib/" + service["StateDirectory"]
    assert re.fullmatch(r"\d+M", service["MemoryMax"])


def _load(path: Path) -> dict[str, Any]:
    documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    assert len(documents) == 1
    assert isinstance(documents[0], dict)
    return documents[0]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_every_manifest_parses_and_drops_all(path: Path) -> None:
    document = _load(path)
    containers = document["spec"]["containers"] if "spec" in document else [document]
    for container in containers:
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]


def test_the_sidecar() -> None:
    document = _load(DEPLOY / "sidecar.yaml")
    assert (document["apiVersion"], document["kind"]) == ("v1", "Pod")
    spec = document["spec"]
    assert spec["shareProcessNamespace"] is True
    containers = {container["name"]: container for container in spec["containers"]}
    watch, server = containers["watch"], containers["server"]
    _check_command(watch["command"])
    assert "add" not in watch["securityContext"]["capabilities"]
    assert "--attach" not in watch["command"]
    address = parse_listen(watch["command"][watch["command"].index("--listen") + 1])
    assert address is not None
    assert address[1] == watch["ports"][0]["containerPort"]
    assert f":{address[1]}/livez" in " ".join(server["livenessProbe"]["exec"]["command"])
    assert document["metadata"]["annotations"]["prometheus.io/port"] == str(address[1])
    # The recorder's folder is one volume, at one path, in both.
    for container in (server, watch):
        names = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        values = {entry["name"]: entry["value"] for entry in container["env"]}
        assert values["DSV4_REPRO_AGENT_DIR"].startswith(names["agent"])
    volumes = {volume["name"] for volume in spec["volumes"]}
    mounts = [mount for container in containers.values() for mount in container["volumeMounts"]]
    assert {mount["name"] for mount in mounts} == volumes
    assert watch["command"][watch["command"].index("--out") + 1] in {mount["mountPath"] for mount in watch["volumeMounts"]}
    # A restart waits until the evidence is on disk.
    probe = server["livenessProbe"]
    assert probe["periodSeconds"] * (probe["failureThreshold"] - 1) > 40
    # The sidecar takes no GPU from the server.
    assert "nvidia.com/gpu" not in watch["resources"].get("limits", {})


def test_the_ephemeral_container() -> None:
    document = _load(DEPLOY / "ephemeral-container.yaml")
    # kubectl takes these from its own command line and refuses them in a profile.
    assert not {"name", "image", "command", "volumeDevices", "lifecycle", "ports", "livenessProbe"} & set(document)
    assert set(document["securityContext"]["capabilities"]["add"]) == {"SYS_PTRACE", "DAC_READ_SEARCH", "KILL"}


def test_the_page_links_to_each_of_them() -> None:
    text = (DEPLOY.parent / "production.md").read_text(encoding="utf-8")
    for path in DEPLOY.iterdir():
        assert f"(deploy/{path.name})" in text
