"""The manifests of examples/kubernetes: Kubernetes' own schemas accept them, and they keep the promises of their comments."""

from __future__ import annotations

import configparser
import fnmatch
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from qworker.cli.run import command as run_command
from qworker.worker import Worker, WorkerOptions

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "kubernetes"
MANIFESTS = sorted(EXAMPLE.rglob("*.yaml"))
DEPLOYMENTS = sorted(EXAMPLE.rglob("deployment.yaml"))
# What a worker needs beyond its grace period to cancel, release and leave; docs/cli.md says it too.
MARGIN = 15.0
# No newer than what clusters run.
VERSION = "1.31"


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def pod(path: Path) -> dict[str, Any]:
    return documents(path)[0]["spec"]["template"]["spec"]


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: str(path.relative_to(EXAMPLE)))
def test_kubernetes_schemas_accept_every_manifest(path: Path) -> None:
    for document in documents(path):
        if document["apiVersion"].startswith("keda.sh/"):
            assert document["kind"] in {"ScaledObject", "TriggerAuthentication"}
            continue
        kubernetes_validate.validate(document, VERSION, strict=True)


@pytest.fixture
def api_server() -> Iterator[str]:
    """What kubectl asks a cluster before it says what it would do: which kinds there are; and none of the objects is there yet."""
    kinds = {(d["apiVersion"], d["kind"]) for path in MANIFESTS for d in documents(path)}

    def answer(path: str) -> dict[str, Any] | None:
        groups = sorted({version for version, _ in kinds if "/" in version})
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            found = [
                (name.partition("/")[0], {"groupVersion": name, "version": name.partition("/")[2]}) for name in groups
            ]
            return {
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [{"name": name, "versions": [at], "preferredVersion": at} for name, at in found],
            }
        place = path.removeprefix("/apis/").removeprefix("/api/")
        if place in {version for version, _ in kinds}:
            names = [
                (kind, re.sub("y$", "ie", kind.lower()) + "s") for version, kind in sorted(kinds) if version == place
            ]
            return {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": place,
                "resources": [
                    {
                        "name": name,
                        "singularName": "",
                        "namespaced": True,
                        "kind": kind,
                        "verbs": ["create", "get", "patch"],
                    }
                    for kind, name in names
                ],
            }
        return None

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answer(self.path.partition("?")[0])
            body = json.dumps(
                found or {"kind": "Status", "apiVersion": "v1", "reason": "NotFound", "code": 404}
            ).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="without kubectl the schemas alone decide")
def test_kubectl_would_apply_every_manifest(api_server: str, tmp_path: Path) -> None:
    how = ["--dry-run=client", "--validate=false", "--output=name", "--recursive"]
    done = subprocess.run(
        ["kubectl", f"--server={api_server}", "apply", *how, f"--filename={EXAMPLE}"],
        env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    wanted = sorted(d["kind"].lower() for path in MANIFESTS for d in documents(path))
    assert sorted(re.split(r"[./]", line)[0] for line in done.stdout.split()) == wanted


def test_the_schemas_would_refuse_a_misspelt_field() -> None:
    document = documents(DEPLOYMENTS[0])[0]
    document["spec"]["template"]["spec"]["terminationGracePeriod"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, VERSION, strict=True)


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=lambda path: path.parent.name)
def test_a_pod_has_time_for_its_whole_drain(path: Path) -> None:
    spec = pod(path)
    (container,) = spec["containers"]
    (before_stop,) = re.findall(r"sleep (\d+)", " ".join(container["lifecycle"]["preStop"]["exec"]["command"]))
    drain = float(option(container["args"], "--shutdown-timeout"))
    assert spec["terminationGracePeriodSeconds"] >= float(before_stop) + drain + MARGIN
    assert documents(path)[0]["spec"]["progressDeadlineSeconds"] > spec["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=lambda path: path.parent.name)
def test_a_pod_runs_a_command_that_qworker_understands(path: Path) -> None:
    (container,) = pod(path)["containers"]
    name, *arguments = container["args"]
    assert name == "run"
    # Parsed by the command itself; --help ends it before it begins.
    done = CliRunner().invoke(run_command, [*arguments, "--help"])
    assert done.exit_code == 0, done.output
    parsed, _, _ = run_command.make_parser(
        run_command.make_context("run", list(arguments), resilient_parsing=True)
    ).parse_args(list(arguments))
    assert parsed["app"] == "app:tasks"
    port = int(parsed["health"].rpartition(":")[2])
    assert [p["containerPort"] for p in container["ports"]] == [port]
    for probe, page in (("startupProbe", "/readyz"), ("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
        assert container[probe]["httpGet"] == {"path": page, "port": container["ports"][0]["name"]}


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=lambda path: path.parent.name)
def test_a_pod_may_do_little(path: Path) -> None:
    spec = pod(path)
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "memory" in container["resources"]["limits"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["volumes"]}
    secrets = [entry for entry in container["env"] if entry["name"] in {"QWORKER_TOKEN"}]
    assert all("valueFrom" in entry for entry in secrets)


def test_everything_selects_the_same_pods() -> None:
    labels = {"app.kubernetes.io/name": "greeter"}
    kinds = {d["kind"]: d for path in MANIFESTS for d in documents(path)}
    assert kinds["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert kinds["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert kinds["Service"]["spec"]["selector"] == labels
    assert kinds["ScaledObject"]["spec"]["scaleTargetRef"]["name"] == kinds["Deployment"]["metadata"]["name"]
    (trigger,) = kinds["ScaledObject"]["spec"]["triggers"]
    assert trigger["authenticationRef"]["name"] == kinds["TriggerAuthentication"]["metadata"]["name"]
    assert trigger["metadata"]["url"].endswith(f":{kinds['Service']['spec']['ports'][0]['port']}/stats")
    assert trigger["metadata"]["valueLocation"] == "backlog"
    assert kinds["ScaledObject"]["spec"]["minReplicaCount"] >= 1, "nobody would answer the scaler"


def test_the_image_is_small_and_not_root() -> None:
    lines = (EXAMPLE / "Dockerfile").read_text().splitlines()
    stages = [line for line in lines if line.startswith("FROM ")]
    assert len(stages) == 2
    last = lines[lines.index(stages[-1], lines.index(stages[0]) + 1) :]
    user = next(line.split()[1] for line in last if line.startswith("USER "))
    assert all(int(part) > 0 for part in user.split(":"))
    assert {str(pod(path)["securityContext"]["runAsUser"]) for path in DEPLOYMENTS} == {user.split(":")[0]}
    assert 'ENTRYPOINT ["qworker"]' in last


def copied() -> list[tuple[list[str], str]]:
    """What the Dockerfile takes from the checkout, each with where it puts it."""
    lines = [line.split() for line in (EXAMPLE / "Dockerfile").read_text().splitlines() if line.startswith("COPY ")]
    return [(words[1:-1], words[-1]) for words in lines if not words[1].startswith("--from")]


def test_the_image_has_the_wheel_of_this_checkout_and_no_other(tmp_path: Path) -> None:
    sent = {line[1:] for line in (EXAMPLE / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sent == {name for names, _ in copied() for name in names}
    for name in sorted(sent):
        source, target = ROOT / name, tmp_path / "src" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if source.is_dir() else shutil.copyfile
        copy(source, target)
    # What is copied is enough to build it.
    code = "from hatchling.build import build_wheel; print(build_wheel('..'))"
    built = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "src", capture_output=True, text=True, timeout=50, check=True
    ).stdout.split()[-1]
    (pattern, extras) = re.findall(r'/wheels/(\S+\.whl)\)\[(.*)\]"', (EXAMPLE / "Dockerfile").read_text())[0]
    assert fnmatch.fnmatch(built, pattern)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= set(known)


def test_systemd_waits_for_the_drain() -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str
    unit.read(EXAMPLE / "qworker.service")
    service = unit["Service"]
    arguments = service["ExecStart"].split()
    assert float(service["TimeoutStopSec"]) >= float(option(arguments, "--shutdown-timeout")) + MARGIN
    assert service["KillMode"] == "mixed"
    assert arguments[1:3] == ["run", "app:tasks"]


async def test_the_app_of_the_example_runs() -> None:
    tasks = runpy.run_path(str(EXAMPLE / "app.py"))["tasks"]
    tasks.url = "memory://kubernetes-example"
    await tasks["greet"].enqueue("Ada", seconds=0.0)
    worker = Worker(tasks, WorkerOptions(burst=True))
    assert await worker.run()
    await tasks.aclose()
    assert worker.counts.acked == 1
