"""The manifests of examples/kubernetes: Kubernetes' schemas accept them, and they do what their comments say."""

from __future__ import annotations

import fnmatch
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
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
MANIFESTS = sorted(path for path in EXAMPLE.rglob("*.yaml") if path.name != "kustomization.yaml")
README = (EXAMPLE / "README.md").read_text()
DEPLOYMENTS = sorted(EXAMPLE.rglob("deployment.yaml"))
# What a worker needs beyond its grace period to cancel, release and leave; docs/reference/cli.md says it too.
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
    found = documents(path)
    assert found
    for document in found:
        if document["apiVersion"].startswith("keda.sh/"):
            assert document["kind"] in {"ScaledObject", "TriggerAuthentication"}
            continue
        kubernetes_validate.validate(document, VERSION, strict=True)


def resolved(folder: Path) -> list[dict[str, Any]]:
    """What `kubectl apply -k FOLDER` would apply; of kustomize these examples need `resources` alone."""
    (kustomization,) = documents(folder / "kustomization.yaml")
    assert kustomization.pop("apiVersion") == "kustomize.config.k8s.io/v1beta1"
    assert kustomization.pop("kind") == "Kustomization"
    assert list(kustomization) == ["resources"]
    found: list[dict[str, Any]] = []
    for name in kustomization["resources"]:
        path = folder / name
        found += resolved(path) if path.is_dir() else documents(path)
    return found


def identity(document: dict[str, Any]) -> tuple[str, str, str]:
    return document["apiVersion"], document["kind"], document["metadata"]["name"]


def secrets(part: Any) -> set[tuple[str, str]]:
    """The secrets that a document refers to, each as name and key."""
    if isinstance(part, list):
        return set().union(*map(secrets, part))
    if not isinstance(part, dict):
        return set()
    found = {(entry["name"], entry["key"]) for entry in part.get("secretTargetRef", [])}
    if reference := part.get("secretKeyRef"):
        found.add((reference["name"], reference["key"]))
    return found.union(*map(secrets, part.values()))


@pytest.mark.parametrize("queue", ["redis", "directory"])
def test_a_kustomization_applies_everything_that_its_queue_needs_and_all_of_it_fits_together(queue: str) -> None:
    found = resolved(EXAMPLE / queue)
    assert len({identity(document) for document in found}) == len(found), "one object would replace another"
    common = {path for path in (EXAMPLE / "base").glob("*.yaml") if path in MANIFESTS}
    own = {path for path in (EXAMPLE / queue).glob("*.yaml") if path in MANIFESTS}
    assert sorted(map(identity, found)) == sorted(identity(d) for path in common | own for d in documents(path))
    # All in the namespace that `kubectl` is told, or in none by name: the URL that KEDA asks is the exception.
    assert all("namespace" not in document["metadata"] for document in found)
    kinds = {document["kind"]: document for document in found}
    pods = kinds["Deployment"]["spec"]["template"]
    selectors = [
        kinds["Deployment"]["spec"]["selector"]["matchLabels"],
        kinds["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        kinds["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        kinds["Service"]["spec"]["selector"],
    ]
    assert all(selector and selector.items() <= pods["metadata"]["labels"].items() for selector in selectors)
    ports = {port["name"] for container in pods["spec"]["containers"] for port in container["ports"]}
    assert {port["targetPort"] for port in kinds["Service"]["spec"]["ports"]} <= ports
    claims = {v["persistentVolumeClaim"]["claimName"] for v in pods["spec"]["volumes"] if "persistentVolumeClaim" in v}
    assert claims == {document["metadata"]["name"] for document in found if document["kind"] == "PersistentVolumeClaim"}
    # The README makes the one secret, with these keys.
    (made,) = re.findall(r"kubectl create secret generic (\S+) (.*?)\n[a-z]", README, re.DOTALL)
    known = {(made[0], key) for key in re.findall(r"--from-literal=(\w+)=", made[1])}
    assert set().union(*map(secrets, found)) <= known


def test_the_page_and_the_readme_apply_what_there_is() -> None:
    page = (ROOT / "docs" / "howto" / "kubernetes.md").read_text()
    for text in (README, page):
        named = set(re.findall(r"(?<!\w)-k (\w+)", text))
        assert named == {path.parent.name for path in EXAMPLE.rglob("kustomization.yaml")} - {"base"}


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
    secrets = [entry for entry in container["env"] if entry["name"] in {"QWORKER_HTTP_TOKEN"}]
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


async def test_the_app_of_the_example_runs() -> None:
    tasks = runpy.run_path(str(EXAMPLE / "app.py"))["tasks"]
    tasks.url = "memory://kubernetes-example"
    await tasks["greet"].enqueue("Ada", seconds=0.0)
    worker = Worker(tasks, WorkerOptions(burst=True))
    assert await worker.run()
    await tasks.aclose()
    assert worker.counts.acked == 1
