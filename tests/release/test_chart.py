"""The Helm chart: its values keep the schema, and what it renders is a node that the command line accepts.

Helm itself renders where it is installed. Elsewhere a small reading of its templates serves: `if`, `else`, `range`,
`quote` and names, which is all that the chart uses.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from jinja2 import Environment, StrictUndefined
from typer.testing import CliRunner

import dfca
from dfca.cli import app
from dfca.node.task.config import INVITE_PORT, PORT, NodeConfig

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "dfca-node"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def jinja_of(template: str) -> str:
    """Write a template of Helm as one of Jinja."""
    open_blocks: list[str] = []

    def translated(match: re.Match[str]) -> str:
        left, words = match["left"], re.sub(r"(?<!\S)\.(\w+)", r"\1", match["words"].strip())
        keyword, _, rest = words.partition(" ")
        if keyword in ("if", "range"):
            open_blocks.append({"if": "endif", "range": "endfor"}[keyword])
            return f"{{%{left} if {rest} %}}" if keyword == "if" else f"{{%{left} for dot in {rest} %}}"
        if keyword in ("else", "end"):
            return f"{{%{left} {open_blocks.pop() if keyword == 'end' else keyword} %}}"
        return f"{{{{ {re.sub(r'^[.](?= )', 'dot', words)} }}}}"

    return re.sub(r"\{\{(?P<left>-?)(?P<words>.*?)\}\}", translated, template)


def render(values: dict[str, Any]) -> dict[str, Any]:
    """Render the chart for a release "kitchen" in the namespace "home"; documents by their kind."""
    jsonschema.validate(values, SCHEMA)
    if helm := shutil.which("helm"):
        command = [helm, "template", "kitchen", str(CHART), "--namespace", "home", "--values", "-"]
        text = subprocess.run(command, input=json.dumps(values), check=True, capture_output=True, text=True).stdout
    else:
        environment = Environment(undefined=StrictUndefined, trim_blocks=False)
        environment.filters["quote"] = json.dumps
        names = {"Values": values, "Release": {"Name": "kitchen", "Namespace": "home"}}
        templates = sorted((CHART / "templates").glob("*.yaml"))
        text = "\n---\n".join(environment.from_string(jinja_of(path.read_text())).render(names) for path in templates)
    return {document["kind"]: document for document in yaml.safe_load_all(text) if document}


def values(**changes: Any) -> dict[str, Any]:
    return VALUES | {"data": VALUES["data"] | {"claim": "kitchen-data"}} | changes


def pod(documents: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = documents["StatefulSet"]["spec"]["template"]["spec"]
    return spec


def test_the_versions_are_those_of_the_package() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == dfca.__version__
    assert VALUES["image"]["tag"] == dfca.__version__


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"data": VALUES["data"]}, "does not match"),  # no claim
        ({"invite": "http://x"}, "does not match"),
        ({"storage": 2}, "is not of type 'string'"),
        ({"replicas": 3}, "Additional properties"),
        ({"service": "Ingress"}, "is not one of"),
    ],
)
def test_the_schema_refuses(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(jsonschema.ValidationError, match=word):
        jsonschema.validate(values(**changes), SCHEMA)


def test_the_parts_of_the_chart_fit_together() -> None:
    documents = render(values())
    assert set(documents) == {"Service", "StatefulSet"}
    service, stateful, spec = documents["Service"], documents["StatefulSet"]["spec"], pod(documents)
    labels = stateful["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == stateful["selector"]["matchLabels"] == labels
    assert stateful["serviceName"] == service["metadata"]["name"]
    (node,), (first,) = spec["containers"], spec["initContainers"]
    ports = {port["name"]: port["containerPort"] for port in node["ports"]}
    assert ports == {"swarm": PORT, "invite": INVITE_PORT}
    assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == ports
    volumes = {
        volume["name"] for volume in (*spec["volumes"], *(c["metadata"] for c in stateful["volumeClaimTemplates"]))
    }
    for container in (node, first):
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        assert container["image"] == f"dfca:{dfca.__version__}"
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert spec["securityContext"]["runAsUser"] == 1000  # the user of the Dockerfile
    assert "--uid 1000" in (ROOT / "Dockerfile").read_text()
    assert node["args"] == ["run", first["args"][1]]


@pytest.mark.parametrize(
    ("changes", "address"), [({}, "kitchen.home.svc:7447"), ({"advertise": "203.0.113.5:7447"}, "203.0.113.5:7447")]
)
def test_the_words_of_the_first_container_found_a_swarm(changes: dict[str, Any], address: str, tmp_path: Path) -> None:
    (first,) = pod(render(values(arguments=["--label", "activity", "--expect", "3"], **changes)))["initContainers"]
    (tmp_path / "samples.csv").write_text("a,b,activity\n" + "1,2,sit\n2,1,run\n" * 10)
    places = {"/node/state": str(tmp_path / "state"), VALUES["data"]["path"]: str(tmp_path / "samples.csv")}
    words = [places.get(word, word) for word in first["args"]]
    result = CliRunner().invoke(app, ["node", *words])
    assert result.exit_code == 0, result.output
    config = NodeConfig.load(tmp_path / "state")
    assert (config.name, config.network.advertise) == ("kitchen", (address,))
    # At the next start the folder has a node: the container founds nothing.
    again = subprocess.run([*first["command"], *words], check=True, capture_output=True, text=True)
    assert (again.stdout, again.stderr) == ("", "")


def test_with_an_invite_it_joins() -> None:
    (first,) = pod(render(values(invite="dfca1:10.0.0.1:7448/abc/def")))["initContainers"]
    assert first["args"][:3] == ["join", "/node/state", "dfca1:10.0.0.1:7448/abc/def"]
