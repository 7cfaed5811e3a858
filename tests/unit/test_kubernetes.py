"""The manifests of examples/kubernetes: Kubernetes' schemas accept them, and they do what their comments say."""

from __future__ import annotations

import fnmatch
import http.client
import re
import runpy
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any, cast

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from qworker.cli.run import command as run_command
from qworker.health.address import listen
from qworker.health.answers import HealthAnswers
from qworker.health.server import HealthServer
from qworker.health.worker_report import WorkerReport
from qworker.worker import Worker, WorkerOptions
from tests.support.pages import blocks
from tests.support.reference import metrics
from tests.support.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "kubernetes"
ALERTS = ROOT / "examples" / "prometheus" / "alerts.yml"
MANIFESTS = sorted(path for path in EXAMPLE.rglob("*.yaml") if path.name != "kustomization.yaml")
README = (EXAMPLE / "README.md").read_text()
DEPLOYMENTS = sorted(EXAMPLE.rglob("deployment.yaml"))
# What a worker needs beyond its grace period to cancel, release and leave; docs/reference/cli.md says it too.
MARGIN = 15.0
# No newer than what clusters run.
VERSION = "1.31"
# Kinds that Kubernetes itself does not know.
FOREIGN = {"keda.sh/v1alpha1": {"ScaledObject", "TriggerAuthentication"}}
FOREIGN["monitoring.coreos.com/v1"] = {"PodMonitor", "PrometheusRule"}
COMPONENTS = {"keda", "monitoring"}


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
        if document["apiVersion"] in FOREIGN:
            assert document["kind"] in FOREIGN[document["apiVersion"]]
            continue
        kubernetes_validate.validate(document, VERSION, strict=True)


def resolved(folder: Path, *, with_components: bool) -> list[dict[str, Any]]:
    """What `kubectl apply -k FOLDER` applies. These examples use resources, components, and patches that remove."""
    text = (folder / "kustomization.yaml").read_text()
    kustomization = yaml.safe_load(text.replace("# components:", "components:") if with_components else text)
    kind = kustomization.pop("apiVersion"), kustomization.pop("kind")
    assert kind[0] == f"kustomize.config.k8s.io/{'v1alpha1' if kind[1] == 'Component' else 'v1beta1'}"
    assert {*kustomization} <= {"resources", "components", "patches"}
    found: list[dict[str, Any]] = []
    for name in kustomization["resources"]:
        path = folder / name
        found += resolved(path, with_components=with_components) if path.is_dir() else documents(path)
    for name in kustomization.get("components", []):
        part = folder / name
        found += resolved(part, with_components=True)
        for patch in yaml.safe_load((part / "kustomization.yaml").read_text()).get("patches", []):
            apply_patch(found, patch)
    return found


def apply_patch(found: list[dict[str, Any]], patch: dict[str, Any]) -> None:
    (target,) = [d for d in found if patch["target"].items() <= {"kind": d["kind"], "name": identity(d)[2]}.items()]
    for step in yaml.safe_load(patch["patch"]):
        assert (step["op"], step["path"]) == ("remove", "/spec/replicas")
        del target["spec"]["replicas"]


def identity(document: dict[str, Any]) -> tuple[str, str, str]:
    return document["apiVersion"], document["kind"], document["metadata"]["name"]


def secrets(part: Any) -> set[tuple[str, str]]:
    """The secrets that a document refers to, each as name and key."""
    if isinstance(part, list):
        return set[tuple[str, str]]().union(*map(secrets, cast("list[Any]", part)))
    if not isinstance(part, dict):
        return set()
    fields = cast("dict[str, Any]", part)
    references = [*fields.get("secretTargetRef", []), fields.get("secretKeyRef"), fields.get("credentials")]
    found = {(str(reference["name"]), str(reference["key"])) for reference in references if reference}
    return found.union(*map(secrets, fields.values()))


@pytest.mark.parametrize("components", [set[str](), COMPONENTS], ids=["alone", "with components"])
@pytest.mark.parametrize("queue", ["redis", "directory"])
def test_a_kustomization_applies_everything_that_its_queue_needs_and_all_of_it_fits_together(
    queue: str, components: set[str]
) -> None:
    found = resolved(EXAMPLE / queue, with_components=bool(components))
    assert len({identity(document) for document in found}) == len(found), "one object would replace another"
    paths = [path for path in MANIFESTS if path.parent.name in {"base", queue, *components}]
    assert sorted(map(identity, found)) == sorted(identity(d) for path in paths for d in documents(path))
    # All in the namespace that `kubectl` is told, or in none by name: the URL that KEDA asks is the exception.
    assert all("namespace" not in document["metadata"] for document in found)
    kinds = {document["kind"]: document for document in found}
    # Either the Deployment or KEDA sets the number of pods.
    assert ("replicas" in kinds["Deployment"]["spec"]) == ("ScaledObject" not in kinds)
    pods = kinds["Deployment"]["spec"]["template"]
    selectors = [
        kinds["Deployment"]["spec"]["selector"]["matchLabels"],
        kinds["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        *(d["spec"]["podSelector"]["matchLabels"] for d in found if d["kind"] == "NetworkPolicy"),
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
        assert named == {path.parent.name for path in EXAMPLE.rglob("kustomization.yaml")} - {"base", *COMPONENTS}


def test_the_page_shows_the_deployment_that_it_applies() -> None:
    shown = [block.text for block in blocks("docs/howto/kubernetes.md") if block.language == "yaml"]
    assert (EXAMPLE / "redis" / "deployment.yaml").read_text() in shown


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
    assert parsed["wait_for_backend"], "a pod that starts before its store crashes in a loop"
    port = int(parsed["health"].rpartition(":")[2])
    assert [p["containerPort"] for p in container["ports"]] == [port]
    for probe, page in (("startupProbe", "/livez"), ("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
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
    assert kinds["PodMonitor"]["spec"]["selector"]["matchLabels"] == labels
    assert kinds["Service"]["spec"]["selector"] == labels
    for spread in kinds["Deployment"]["spec"]["template"]["spec"]["topologySpreadConstraints"]:
        assert spread["labelSelector"]["matchLabels"] == labels
    assert kinds["ScaledObject"]["spec"]["scaleTargetRef"]["name"] == kinds["Deployment"]["metadata"]["name"]
    (trigger,) = kinds["ScaledObject"]["spec"]["triggers"]
    assert trigger["authenticationRef"]["name"] == kinds["TriggerAuthentication"]["metadata"]["name"]
    assert trigger["metadata"]["url"].endswith(f":{kinds['Service']['spec']['ports'][0]['port']}/stats")
    assert trigger["metadata"]["valueLocation"] == "backlog"
    assert kinds["ScaledObject"]["spec"]["minReplicaCount"] >= 1, "nobody would answer the scaler"


def status(port: int, page: str, authorization: str | None = None) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("GET", page, headers={} if authorization is None else {"Authorization": authorization})
        return connection.getresponse().status
    finally:
        connection.close()


def test_with_a_token_probes_need_none_and_prometheus_and_keda_send_it() -> None:
    kinds = {d["kind"]: d for path in MANIFESTS for d in documents(path)}
    (container,) = pod(DEPLOYMENTS[0])["containers"]
    probes = [container[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    (endpoint,) = kinds["PodMonitor"]["spec"]["podMetricsEndpoints"]
    (trigger,) = kinds["ScaledObject"]["spec"]["triggers"]
    scraped = [
        (endpoint["path"], endpoint["authorization"]["type"]),
        ("/" + trigger["metadata"]["url"].rpartition("/")[2], trigger["metadata"]["authMode"].title()),
    ]
    assert endpoint["port"] == container["ports"][0]["name"]
    answers = HealthAnswers(
        lambda: [WorkerReport(life="1", pid=1, state="working", looked_at=time.time())], stall_timeout=60.0
    )
    server = HealthServer(listen(("127.0.0.1", 0)), answers, token="open-sesame")
    try:
        for page, scheme in scraped:
            # Annotations like prometheus.io/scrape cannot send a token: such a scraper gets 401 and locks out no other.
            assert [status(server.port, page) for _ in range(20)] == [401] * 20
            assert status(server.port, page, f"{scheme} open-sesame") == 200
        assert [status(server.port, page) for page in probes] == [200] * 3
    finally:
        server.close()


# -- alerts ------------------------------------------------------------------------------------------------------------


def rules() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]}


def test_the_operator_and_a_plain_prometheus_have_the_same_alerts() -> None:
    (document,) = documents(EXAMPLE / "monitoring" / "alerts.yaml")
    assert document["spec"] == yaml.safe_load(ALERTS.read_text())
    settings = yaml.safe_load(ALERTS.with_name("prometheus.yml").read_text())
    assert settings["rule_files"] == [ALERTS.name]
    page = (ROOT / "docs" / "howto" / "metrics.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page.partition("### Alerts")[2], re.MULTILINE) == [*rules()]


# What an expression has beside the names of metrics.
PROMQL = {"absent", "by", "increase", "max", "offset", "or", "sum", "unless"}


@pytest.mark.parametrize("alert", rules())
def test_an_alert_uses_metrics_and_labels_that_there_are(alert: str) -> None:
    rule = rules()[alert]
    known = metrics()
    labels = {"instance"}.union(*(metric.labels for metric in known.values()))
    expression = rule["expr"]
    matched = re.findall(r"(\w+)\{(\w+)=\"(\w+)\"\}", expression)
    grouped = [name for names in re.findall(r"by \((.*?)\)", expression) for name in names.split(", ")]
    shown = re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))
    assert {*grouped, *shown} <= labels
    assert all(label in known[metric].labels for metric, label, _ in matched)
    bare = re.sub(r"by \(.*?\)|\{.*?\}|\[.*?\]|offset \w+", "", expression)
    named = {*re.findall(r"[a-z]\w+", bare)} - PROMQL
    assert named
    assert named <= {*known}
    # A parenthesis that is open or an aggregation that hides a label is an empty alert.
    assert expression.count("(") == expression.count(")")
    assert not grouped or {*shown} <= {*grouped}
    assert rule["labels"]["severity"] in {"warning", "critical"}


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
