"""Writes deploy/kustomize: what the chart makes of its defaults, for who does not use Helm; and the
names of all settings for the chart, which refuses others.

`make kustomize` runs it. Keys are not in there: Helm would make them up, so here they are files
that whoever applies it writes beside (docs/DEPLOYING.md).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import yaml

from pdserve.settings.config import CoordinatorConfig, NodeConfig
from pdserve.settings.described import settings_of
from tools.chart import CHART, Document, renderer

FOLDER: Final = CHART.parents[1] / "kustomize"
SETTINGS: Final = CHART / "settings.txt"
_RELEASE = "pdserve"
_HELMS = ("app.kubernetes.io/managed-by", "helm.sh/chart")  # labels that say who made it
_HEAD = "# Written by `make kustomize` from the defaults of deploy/helm/pdserve.\n"


def files(documents: Sequence[Document]) -> dict[str, str]:
    """Return the files for these documents of the chart, by name."""
    plain = {
        f"{document['metadata']['name']}-{document['kind'].lower()}.yaml": _without_helm(document)
        for document in documents
        if document["kind"] != "Secret"
    }
    secrets = [document for document in documents if document["kind"] == "Secret"]
    return {
        "kustomization.yaml": _HEAD + _dump(_kustomization(sorted(plain), secrets)),
        **{name: _HEAD + _dump(document) for name, document in plain.items()},
    }


def rendered() -> dict[str, str]:
    """Return the files for the chart as it is."""
    with tempfile.TemporaryDirectory() as folder, renderer(Path(folder)) as chart:
        return files(chart.render({}, _RELEASE))


def settings() -> str:
    """Return the names of the settings that a part of the chart may have, a line each."""
    structs = {"coordinator": CoordinatorConfig, "node": NodeConfig}
    return "".join(
        f"{kind} {setting.name}\n"
        for kind, struct in structs.items()
        for setting in settings_of(struct)
    )


def _kustomization(resources: Sequence[str], secrets: Iterable[Document]) -> Document:
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": list(resources),
        "secretGenerator": [
            {"name": secret["metadata"]["name"], "files": sorted(secret["data"])}
            for secret in secrets
        ],
        "generatorOptions": {"disableNameSuffixHash": True},
    }


def _without_helm(found: object) -> object:
    if isinstance(found, dict):
        return {key: _without_helm(value) for key, value in found.items() if key not in _HELMS}
    return [_without_helm(item) for item in found] if isinstance(found, list) else found


def _dump(document: object) -> str:
    return yaml.safe_dump(document, sort_keys=False, width=100)


def main() -> None:
    """Write the files, and remove what is no longer made."""
    SETTINGS.write_text(settings())
    made = rendered()
    FOLDER.mkdir(exist_ok=True)
    for file in FOLDER.glob("*.yaml"):
        if file.name not in made:
            file.unlink()
    for name, text in made.items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
