"""docs/manifests: their fields are those of the APIs, they fit each other, and the server understands their commands."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import jaxspec
from jaxspec.config import EngineConfig
from jaxspec.nodes import Nodes
from serve.cli import resolve_serve
from serve.flags import engine_config
from serve.nodes import nodes_given

MANIFESTS = Path(jaxspec.__file__).parents[1] / "docs" / "manifests"
# Of leaderworkerset.x-k8s.io/v1, apps/v1 and v1: the fields of an object that may be given.
FIELDS = {
    "LeaderWorkerSet": {"replicas", "leaderWorkerTemplate", "rolloutStrategy", "startupPolicy", "networkConfig"},
    "leaderWorkerTemplate": {
        "leaderTemplate", "workerTemplate", "size", "restartPolicy", "subGroupPolicy", "volumeClaimTemplates",
        "persistentVolumeClaimRetentionPolicy",
    },
    "Deployment": {
        "replicas", "selector", "template", "strategy", "minReadySeconds", "revisionHistoryLimit", "paused",
        "progressDeadlineSeconds",
    },
    "Service": {"selector", "ports", "clusterIP", "type", "publishNotReadyAddresses", "sessionAffinity"},
    "pod": {"containers", "volumes", "terminationGracePeriodSeconds", "nodeSelector", "hostNetwork", "serviceAccountName"},
    "container": {
        "name", "image", "command", "args", "env", "ports", "readinessProbe", "livenessProbe", "startupProbe", "lifecycle",
        "resources", "volumeMounts", "securityContext",
    },
    "probe": {"httpGet", "periodSeconds", "failureThreshold", "timeoutSeconds", "initialDelaySeconds", "successThreshold"},
}  # fmt: skip
VERSIONS = {"LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1", "Deployment": "apps/v1", "Service": "v1"}
SHUTDOWN_SECONDS = 60.0


def documents(name: str) -> dict[str, Any]:
    """Kind -> spec, of a file whose objects are all called jaxspec."""
    found = {}
    for document in yaml.safe_load_all((MANIFESTS / name).read_text()):
        assert set(document) == {"apiVersion", "kind", "metadata", "spec"}
        kind = document["kind"]
        assert document["apiVersion"] == VERSIONS[kind]
        assert document["metadata"] == {"name": "jaxspec"}
        assert set(document["spec"]) <= FIELDS[kind]
        found[kind] = document["spec"]
    return found


def server_of(template: dict[str, Any], **variables: str) -> tuple[EngineConfig, Nodes | None, dict[str, Any]]:
    """What the one container of a pod's template runs, after a check of the pod."""
    assert set(template) == {"metadata", "spec"}
    pod = template["spec"]
    assert set(pod) <= FIELDS["pod"]
    assert pod["terminationGracePeriodSeconds"] > SHUTDOWN_SECONDS
    (container,) = pod["containers"]
    assert set(container) <= FIELDS["container"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
    for probe, path in (("readinessProbe", "/ready"), ("livenessProbe", "/health")):
        if probe in container:
            assert set(container[probe]) <= FIELDS["probe"]
            assert container[probe]["httpGet"] == {"path": path, "port": "http"}
    for variable in container.get("env", ()):
        assert variable.keys() in ({"name", "value"}, {"name", "valueFrom"})
    words = [*container["command"], *container["args"]]
    words = [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word) for word in words]
    config, nodes, arguments = parsed(words)
    if ports:
        assert ports["http"] == arguments["port"]
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) * (nodes.count if nodes else 1) == (
        config.tensor_parallel_size
    )
    return config, nodes, arguments | {"ports": ports}


def parsed(words: list[str]) -> tuple[EngineConfig, Nodes | None, dict[str, Any]]:
    assert words[:2] == ["jaxspec", "serve"]
    resolved = resolve_serve(words[2:])
    assert not resolved.notes
    assert resolved.arguments.shutdown_timeout == SHUTDOWN_SECONDS
    config, _ = engine_config(resolved.arguments)
    return config, nodes_given(resolved.arguments, config), vars(resolved.arguments)


def test_replicas_are_servers_of_their_own():
    found = documents("replicas.yaml")
    template = found["Deployment"]["template"]
    assert (
        found["Deployment"]["selector"]["matchLabels"] == found["Service"]["selector"] == template["metadata"]["labels"]
    )
    _, nodes, _ = server_of(template)
    assert nodes is None
    assert found["Service"]["clusterIP"] == "None"  # the router sees each pod
    assert found["Service"]["ports"] == [{"name": "http", "port": 8000, "targetPort": "http"}]


def test_a_leader_worker_set_is_one_group():
    found = documents("leader-worker-set.yaml")
    group = found["LeaderWorkerSet"]["leaderWorkerTemplate"]
    assert set(group) <= FIELDS["leaderWorkerTemplate"]
    assert group["restartPolicy"] == "RecreateGroupOnPodRestart"
    leader, nodes, arguments = server_of(group["leaderTemplate"], POD_IP="10.0.0.1")
    variables = {"LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "jaxspec-0.jaxspec.default"}
    worker, others, more = server_of(group["workerTemplate"], **variables)
    assert leader == worker
    assert leader.num_gpu_blocks_override
    assert nodes
    assert others
    assert (nodes.rank, others.rank, nodes.count, others.count) == (0, 1, group["size"], group["size"])
    assert arguments["model"] == more["model"]
    assert (nodes.port, nodes.port + 1, nodes.port) == (
        arguments["ports"]["orders"],
        arguments["ports"]["coordinator"],
        others.port,
    )
    labels = group["leaderTemplate"]["metadata"]["labels"]
    assert found["Service"]["selector"] == labels != group["workerTemplate"]["metadata"]["labels"]


def test_slurm_starts_each_process_with_its_rank(tmp_path):
    """With the commands of Slurm replaced by ones that show what they are given."""
    stubs = {
        "scontrol": 'echo "host7\nhost8"',
        "srun": 'test "$1" = --kill-on-bad-exit=1 && shift && for SLURM_PROCID in 0 1; do export SLURM_PROCID; "$@"; done',
        "jaxspec": 'printf "%s\\n" jaxspec "$@" end',
    }
    for name, script in stubs.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "host[7-8]", "SLURM_NTASKS": "2"}
    written = subprocess.run(
        ["bash", MANIFESTS / "slurm.sh"], env=environ, capture_output=True, text=True, check=True, timeout=30
    )
    first, second, rest = written.stdout.split("end\n")
    assert not rest
    (leader, nodes, _), (worker, others, _) = (parsed(words.split("\n")[:-1]) for words in (first, second))
    assert leader == worker
    assert leader.tensor_parallel_size == 16
    assert nodes == Nodes(2, 0, "host7", 7000, step_timeout=300.0)
    assert others == Nodes(2, 1, "host7", 7000, step_timeout=300.0)


def test_the_router_asks_each_replica_whether_it_is_ready():
    text = (MANIFESTS / "haproxy.cfg").read_text()
    backends = re.split(r"^backend ", text, flags=re.MULTILINE)[1:]
    assert len(backends) == 2
    for backend in backends:
        assert "option httpchk GET /ready\n" in backend
        assert "on-error fastinter" in backend
        assert re.search(r"server-template replica \d+ jaxspec:8000\n", backend)  # the headless service


@pytest.mark.skipif(shutil.which("haproxy") is None, reason="needs HAProxy")
def test_haproxy_takes_its_configuration():
    path = MANIFESTS / "haproxy.cfg"
    checked = subprocess.run(["haproxy", "-c", "-f", path], capture_output=True, text=True, check=False, timeout=30)
    assert checked.returncode == 0, checked.stderr
